"""Counts what the shape of the package can be read from; `python tests/figures.py` prints it."""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "gradsight"
NOT_COUNTED_FOR_CALLABLES = ("ghost", "memory", "train", "cli")
FRONT_DOOR = (
    "watch",
    "GhostEngine",
    "GradientDumper",
    "WatchOptions",
    "InfluenceSampler",
    "DomainMixer",
)
"""Signatures that are the public contract's own."""
MOST_PARAMETERS = 6
WIDTH = 100
SMALL = 40


def sources(package: Path = PACKAGE) -> Iterator[tuple[Path, str, ast.Module]]:
    """Every module of the package: its path, its text and its syntax tree."""
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        yield path.relative_to(package), text, ast.parse(text)


def root_modules() -> list[str]:
    """Modules at the root beside the front door, the command and the errors."""
    expected = {"__init__.py", "__main__.py", "errors.py"}
    return [path.name for path in sorted(PACKAGE.glob("*.py")) if path.name not in expected]


def callables_in_annotations() -> list[str]:
    """Where `Callable` stands in an annotation, outside the parts that are made of functions."""
    places = []
    for path, _, tree in sources():
        if path.parts[0] in NOT_COUNTED_FOR_CALLABLES:
            continue
        nodes = [node for each in _annotations(tree) for node in ast.walk(each)]
        named = [node for node in nodes if isinstance(node, ast.Name)]
        places += [f"{path}:{node.lineno}" for node in named if node.id == "Callable"]
    return places


def _annotations(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.returns


def names_with_several_homes() -> list[str]:
    """Public functions and classes at the top level of more than one module."""
    homes: Counter[str] = Counter()
    for _, _, tree in sources():
        for node in tree.body:
            is_named = isinstance(node, ast.FunctionDef | ast.ClassDef)
            if is_named and not node.name.startswith("_"):
                homes[node.name] += 1
    return sorted(name for name, count in homes.items() if count > 1)


def functions_with_many_parameters() -> list[str]:
    """Functions with more than six parameters, outside the front door and the commands.

    Nor of a device's kernels, which take every pointer and size by itself.
    """
    many = []
    for path, _, tree in sources():
        for owner, function in _functions(tree):
            arguments = function.args
            names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            count = len([each for each in names if each.arg not in ("self", "cls", "ctx")])
            is_command = path.parts[0] == "cli" and not function.name.startswith("_")
            is_contract = function.name in FRONT_DOOR or owner in FRONT_DOOR
            is_kernel = any(ast.unparse(each) == "triton.jit" for each in function.decorator_list)
            is_ruled = not (is_command or is_contract or is_kernel)
            if count > MOST_PARAMETERS and is_ruled:
                many.append(f"{path}:{function.lineno} {function.name} {count}")
    return many


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function, with the class that it is a method of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for child in node.body:
                # torch calls these two with the operator's own arguments.
                is_autograds = isinstance(child, ast.FunctionDef) and child.name == "forward"
                if isinstance(child, ast.FunctionDef) and not is_autograds:
                    yield node.name, child
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not _is_method(tree, node):
            yield "", node


def _is_method(tree: ast.Module, function: ast.FunctionDef) -> bool:
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return any(function in each.body for each in classes)


def tuple_assignments_of_attributes() -> list[str]:
    """Lines that set several attributes at once: one line, several facts."""
    places = []
    for path, _, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                is_tuple = isinstance(target, ast.Tuple)
                if is_tuple and any(isinstance(each, ast.Attribute) for each in target.elts):
                    places.append(f"{path}:{node.lineno}")
    return places


def ternaries_per_thousand_lines() -> float:
    """Conditional expressions per 1,000 lines that are not blank."""
    count = 0
    lines = 0
    for _, text, tree in sources():
        count += sum(isinstance(node, ast.IfExp) for node in ast.walk(tree))
        lines += _lines(text)
    return 1000 * count / lines


def comment_share() -> float:
    """The share of lines that carry a comment; those for tools alone are none."""
    comments = 0
    lines = 0
    for _, text, _ in sources():
        lines += _lines(text)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and not _is_for_tools(token.string):
                comments += 1
    return comments / lines


def _is_for_tools(comment: str) -> bool:
    return comment.startswith(("# type:", "# noqa", "# mypy", "# fmt", "# pyright"))


def _lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


def long_lines() -> list[str]:
    """Lines over 100 columns."""
    return [
        f"{path}:{number}"
        for path, text, _ in sources()
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > WIDTH
    ]


def small_files() -> list[str]:
    """Files under 40 lines, outside the checks and the packages' own files."""
    return [
        str(path)
        for path, text, _ in sources()
        if len(text.splitlines()) < SMALL
        and path.name not in ("__init__.py", "__main__.py", "errors.py")
        and "checks" not in path.parts
    ]


FIGURES: dict[str, Callable[[], object]] = {
    "modules at the root": root_modules,
    "Callable in annotations": callables_in_annotations,
    "public names with several homes": names_with_several_homes,
    "functions with more than 6 parameters": functions_with_many_parameters,
    "tuple assignments of attributes": tuple_assignments_of_attributes,
    "ternaries per 1,000 lines": ternaries_per_thousand_lines,
    "share of lines with a comment": comment_share,
    "lines over 100 columns": long_lines,
    "files under 40 lines": small_files,
}


def main() -> None:
    """Print every figure; with a name as argument, what it counts."""
    for name, figure in FIGURES.items():
        value = figure()
        number = f"{value:.3g}" if isinstance(value, float) else len(value)  # type: ignore[arg-type]
        print(f"{number:>8}  {name}")
        if name in sys.argv[1:] and isinstance(value, list):
            print("\n".join(f"          {place}" for place in value))


if __name__ == "__main__":
    main()
