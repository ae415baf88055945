"""Marks the tests that reach an internal module of Gradsight as `internal`, when `-m` asks for it.

A rewrite may delete such a test together with the module; it must keep all other tests. The marker
follows from the source: starting from a test and its fixtures, every name is looked up in its file
and in the helper modules that the file imports, until a name comes from a module of Gradsight that
is not public. Scripts in string constants, files that a string constant names, and private
attributes of Gradsight count as well. Not seen: an import of a computed name, and a test that reads
the source of the package. Mark these with `@pytest.mark.internal`.
"""

import ast
import contextlib
import gc
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import gradsight
from contract.public_names import INTEGRATIONS

PACKAGE = Path(gradsight.__file__).parent
MEMBERS = {
    "gradsight.cli": ["main"],
    **{f"gradsight.integrations.{module}": names for module, names in INTEGRATIONS.items()},
}
"""Public modules of which only these members are public."""
PUBLIC = {"gradsight", "gradsight.errors", "gradsight.integrations", *MEMBERS}
TORCH_ATTRIBUTES = {"_buffers", "_modules", "_parameters", "_version"}
"""Private attributes of modules and tensors; Gradsight uses these names too."""

Unit = tuple[Path, str]
"""A file and a top-level name in it, or "" for its statements that bind no name, or "*" for all."""


@cache
def is_internal(name: str) -> bool:
    """Return whether a dotted name belongs to a module of Gradsight that is not public."""
    parts = name.split(".")
    length = 1
    while parts[0] == "gradsight" and length < len(parts):
        path = PACKAGE.joinpath(*parts[1 : length + 1])
        if not path.is_dir() and not path.with_suffix(".py").is_file():
            break
        length += 1
    module, member = ".".join(parts[:length]), "".join(parts[length : length + 1])
    is_public = module in PUBLIC and member in ("", *MEMBERS.get(module, [member]))
    return parts[0] == "gradsight" and not is_public


@cache
def private_names() -> set[str]:
    """Return the private attributes, functions and arguments that Gradsight defines."""
    sources = [path.read_text() for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE]
    found = re.findall(r"(?:self\.|def |^\s*)(_[a-z]\w*[^\W_])\b", "\n".join(sources), re.M)
    return set(found) - TORCH_ATTRIBUTES


def imported_names(*nodes: ast.AST) -> dict[str, str]:
    """Return the names that import statements bind, each with what it stands for."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            found |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            tops = [(name, name.name.split(".")[0]) for name in node.names]
            found |= {name.asname or top: name.name if name.asname else top for name, top in tops}
    return found


def names_in(node: ast.AST, context: type = ast.expr_context) -> set[str]:
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return {each.id for each in names if isinstance(each.ctx, context)}


def references(node: ast.AST, imports: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a kind ("import", "private", "file", "name" of the same file) and what is meant."""
    nodes = list(ast.walk(node))
    imports = imports | imported_names(*nodes)
    done: set[ast.AST] = set()
    for each in nodes:
        attributes: list[str] = []
        if each in done:
            continue
        match each:
            case ast.ImportFrom() | ast.Import():
                names = {*imported_names(each).values(), *(alias.name for alias in each.names)}
                yield from (("import", name) for name in names if is_internal(name))
            case ast.With(items) if "ImportError" in names_in(items[0]):
                done |= set(ast.walk(each))  # it does without a module that is missing
            case ast.Expr(value=ast.Constant() as docstring):
                done.add(docstring)
            case ast.JoinedStr(values):
                constants = {value for value in values if isinstance(value, ast.Constant)}
                done |= constants
                yield from in_text("".join(v.value if v in constants else "_" for v in values))
            case ast.Constant(value=str(text)):
                attributes = [text]
                yield from in_text(text)
            case ast.keyword(arg=str(name)):
                attributes = [name]
            case ast.Attribute() | ast.Name():
                head: ast.AST = each
                while isinstance(head, ast.Attribute):
                    attributes.insert(0, head.attr)
                    head = head.value
                    done |= {head} if isinstance(head, ast.Attribute | ast.Name) else set()
                if isinstance(head, ast.Name) and head.id in imports:
                    yield "import", ".".join([imports[head.id], *attributes])
                    attributes *= imports[head.id].startswith("gradsight")
                elif isinstance(head, ast.Name):
                    yield "name", head.id
                    attributes = attributes[head.id in ("self", "cls") :]
        yield from (("private", name) for name in attributes if name in private_names())


def in_text(text: str) -> Iterator[tuple[str, str]]:
    """Yield what a text refers to if it is a script, or names a module or a file."""
    yield from (("import", name) for name in re.findall(r"\bgradsight(?:\.\w+)+", text))
    if re.fullmatch(r"[\w./-]+\.py", text):
        yield "file", Path(text).name
    if "import " in text:
        with contextlib.suppress(SyntaxError):
            found = references(ast.parse(textwrap.dedent(text)), {})
            yield from (each for each in found if each[0] != "name")


@cache
def parsed(path: Path) -> tuple[dict[str, str], dict[str, list[ast.AST]]]:
    """Return what a file imports, and by unit the statements that make it."""
    tree = ast.parse(path.read_text())
    imports: dict[str, str] = {}
    units: dict[str, list[ast.AST]] = {"*": [tree], "": []}
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name) | ast.ClassDef(name):
                # A decorator of the same file may enter a function into a table of that file.
                used = [getattr(each, "func", each) for each in statement.decorator_list]
                own = [each for each in used if isinstance(each, ast.Name) and each.id in units]
                enters = any(isinstance(units[each.id][0], ast.FunctionDef) for each in own)
                names = {name, ""} if enters else {name}
            case ast.If(test) if "__name__" in names_in(test):
                names = set()
            case ast.Import() | ast.ImportFrom():
                imports |= imported_names(statement)
                names = set()
            case ast.Assign(targets):
                names = set().union(*map(names_in, targets))
            case ast.AugAssign(target) | ast.AnnAssign(target):
                names = names_in(target)
            case _:
                imports |= imported_names(*ast.walk(statement))
                names = names_in(statement, ast.Store) or {""}
        for name in names:
            units.setdefault(name, []).append(statement)
    return imports, units


@cache
def imported_unit(name: str, folder: Path, root: Path) -> Unit | None:
    """Return where an imported name is defined, if that is in a file below the root."""
    parts = name.split(".")
    for base in (folder, *folder.parents):
        for length in range(len(parts), 0, -1):
            path = base.joinpath(*parts[:length])
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file.is_file():
                    known = {key for table in parsed(file) for key in table}
                    return file, "".join({*parts[length : length + 1]} & known) or "*"
        if base == root:
            break
    return None


@cache
def uses(unit: Unit, root: Path) -> tuple[str, list[Unit]]:
    """Return an internal name that a unit refers to, or "", and the units that it refers to."""
    path, name = unit
    imports, units = parsed(path)
    found = {("import", imports[name])} if name in imports else set()
    found = found.union(*(references(node, imports) for node in units.get(name, ())))
    internal = [what for kind, what in found if kind == "private" or is_internal(what)]
    further: list[Unit | None] = [(path, "")]
    for kind, what in found:
        if kind == "name" and what in units:
            further.append((path, what))
        elif kind == "file":
            further += [(file, "*") for file in path.parent.rglob(what)]
        elif kind == "import":
            further.append(imported_unit(what, path.parent, root))
    return min(internal, default=""), [each for each in further if each]


@cache
def internal_name(start: tuple[Unit, ...], root: Path) -> str:
    """Return an internal name that can be reached from some units, or ""."""
    todo, seen = [*start], set()
    while todo:
        unit = todo.pop()
        if unit not in seen:
            seen.add(unit)
            internal, further = uses(unit, root)
            if internal:
                return internal
            todo += further
    return ""


def reached_by(item: Any) -> str:
    """Return an internal name that a collected test reaches, or ""."""
    if isinstance(item, pytest.Function):
        fixtures = [each for found in item._fixtureinfo.name2fixturedefs.values() for each in found]
        code = [inspect.unwrap(each.func).__code__ for each in fixtures]
        units = [(Path(each.co_filename), each.co_name) for each in code]
        of_tests = [unit for unit in units if "site-packages" not in unit[0].parts]
        name = item.cls.__name__ if item.cls else item.originalname
        return internal_name(((item.path, name), *of_tests), item.config.rootpath)
    module = item.dtest.globs["__name__"]
    name = item.name.removeprefix(f"{module}.").split(".")[0]
    is_public = name in gradsight.__all__ and getattr(gradsight, name).__module__ == module
    return module if is_internal(module) and not is_public else ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "internal" not in config.option.markexpr:  # to read all tests takes two seconds
        return
    gc.disable()  # it would double them
    for item in items:
        if name := reached_by(item):
            item.add_marker(pytest.mark.internal(name))
    gc.enable()
