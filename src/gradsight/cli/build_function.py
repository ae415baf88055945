"""A build function named on the command line: file.py:build.

The file is imported for it. A script that trains when it is imported is refused, if possible before
any of it runs: it would train again, and write over what it wrote.
"""

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from gradsight.errors import UsageError, UserCodeError


def load_build(place: str) -> Callable[..., Any]:
    """The function that `file.py:name` names; called, it finds its own folder and no arguments.

    It may take sizes by keyword, such as batch_size.
    """
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not file or not name or path.suffix != ".py":
        raise UsageError(f"a build function is given as file.py:function, got {place!r}")
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    _refuse_training_script(path)
    with _as_a_script(path), _ended_in_words(f"{path} ended when it was read"):
        module = _imported(path)
    build = getattr(module, name, None)
    if not callable(build):
        public = {known: value for known, value in vars(module).items() if known[0] != "_"}
        functions = [known for known, value in public.items() if callable(value)]
        known = ", ".join(functions) or "none"
        raise UsageError(f"{path} has no function {name!r}; it has {known}")
    made: Callable[..., Any] = build

    @functools.wraps(made, updated=())
    def called(**sizes: int) -> Any:
        with _as_a_script(path), _ended_in_words(f"{place} ended"):
            return made(**sizes)

    return called


class _Training(BaseException):
    """A file trains while it is read; not an Exception, so that no script goes on after it."""

    def __init__(self, place: tuple[str, int] | None) -> None:
        super().__init__()
        self.place = place


class _NoTraining:
    """Hears when a backward pass begins or an optimizer steps, and stops that."""

    def before_backward(self, tensors: Any) -> NoReturn:
        """A backward pass begins."""
        from gradsight.core.source import users_place

        raise _Training(users_place())

    def stepping(self, optimizer: Any, args: Any, kwargs: Any) -> NoReturn:
        """An optimizer is about to step."""
        self.before_backward(())


def _imported(path: Path) -> ModuleType:
    """The file as a module, which must not train."""
    spec = spec_from_file_location(f"gradsight_build_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # Where Python looks for a class's module (dataclasses and pickle ask).
    sys.modules[module.__name__] = module
    try:
        with _training_forbidden():
            spec.loader.exec_module(module)
    except _Training as training:
        file, line = training.place or (str(path), 1)
        raise _refusal(Path(file), line) from None
    except Exception as error:
        kind = type(error).__name__
        raise UserCodeError(f"{path} raised {kind} when it was read: {error}") from error
    return module


@contextmanager
def _training_forbidden() -> Iterator[None]:
    """In here, backward and an optimizer's step raise."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from gradsight.core import moments
    from gradsight.core.guard import Guard
    from gradsight.core.hooks import put_hook

    listener = _NoTraining()
    guard = Guard(None, "build", "whether the file trains cannot be told")
    try:
        moments.listen(listener, guard)
        put_hook(guard, register_optimizer_step_pre_hook, listener.stepping)
        yield
    finally:
        guard.close()


@contextmanager
def _as_a_script(path: Path) -> Iterator[None]:
    """As when the file is run by itself: it finds its neighbours, and is given no arguments."""
    arguments = sys.argv
    folder = str(path.resolve().parent)
    sys.argv = [str(path)]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = arguments
        if folder in sys.path:
            sys.path.remove(folder)


@contextmanager
def _ended_in_words(what: str) -> Iterator[None]:
    """A file that ends the process (argparse does, when an argument is missing) is the user's."""
    try:
        yield
    except SystemExit as end:
        raise UserCodeError(
            f"{what} (sys.exit: {end.code}); it is given no arguments here: let it do without them"
        ) from end


def _refuse_training_script(path: Path) -> None:
    """Refuse a file that can be seen to train when it is imported."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not Python: {error}") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    lines = [node.lineno for node in _run_at_import(tree) if _trains(node)]
    if lines:
        raise _refusal(path, min(lines))


def _refusal(path: Path, line: int) -> UsageError:
    return UsageError(
        f"{path.name}:{line} trains when the file is read, as it must be for its build function. "
        'Put what trains below `if __name__ == "__main__":`'
    )


def _trains(call: ast.Call) -> bool:
    """Whether a call is `x.backward()`, or a step of what is called an optimizer."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "step":
        return "opt" in ast.unparse(call)
    return call.func.attr == "backward"


def _run_at_import(tree: ast.Module) -> Iterator[ast.Call]:
    """The calls that run when a file is imported, also those in functions that it calls."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    entered: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and _is_main_guard(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Call):
            yield node
            name = getattr(node.func, "id", None)
            if name in functions and name not in entered:
                entered.add(name)
                waiting += functions[name].body
        waiting += ast.iter_child_nodes(node)


def _is_main_guard(test: ast.expr) -> bool:
    """Whether a condition asks for `__name__`."""
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))
