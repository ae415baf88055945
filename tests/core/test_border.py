"""Whatever is registered with torch, threads, signals or the interpreter goes through the guard."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import gradsight

pytestmark = pytest.mark.internal  # they read the source of the package

PACKAGE = Path(gradsight.__file__).parent
GUARDED = {"run", "attempt"}
REGISTERS = {"Thread", "Timer", "at_fork", "register_at_fork"}
"""Beside these: `atexit.register`, `signal.signal`, and every `register_..._hook` of torch."""
THEIR_OWN = {
    "ghost/tracer.py": "in the user's own `with engine.observe()`: what it refuses they must hear",
    "ghost/observation.py": "the same",
    "ghost/one_pass.py": "the same",
    "ghost/tracing.py": "the same",
    "ghost/loss_calls.py": "engine.loss() is the user's own call, and raises",
    "ghost/verify.py": "engine.verify() is the user's own call, and raises",
    "memory/": "measuring and planning are the user's own calls, and raise",
    "cli/check.py": "the command's own process, which trains nothing",
    "show/serve/server.py": "the same",
    "train/launch.py": "the trainer's own process, which only passes signals on",
    "train/stop_request.py": "the trainer is the user here, and decides what SIGTERM means",
    "first_step/dependence.py": "hooks for two calls of our own, taken away after each",
    "integrations/accelerate.py:note": "appends to a list, in the user's own call of load_state",
    "attach/site/sitecustomize.py:_guarded": "a guard of its own: Gradsight is not loaded by then",
    "core/hooks.py": "the two functions that put the guard around hooks",
    "core/guard.py": "the guard",
}


@cache
def sources() -> list[tuple[str, ast.Module]]:
    return [
        (path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text()))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def registrations(tree: ast.AST) -> Iterator[tuple[ast.Call, list[ast.expr]]]:
    """Calls that hand a function to somebody else, with the functions."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.split(".")[-1]
        is_hook = (
            last.startswith("register_") and last.endswith("_hook")
        ) or last == "register_hook"
        if is_hook or name == "atexit.register":
            yield node, node.args[:1]
        elif name == "signal.signal":
            yield node, node.args[1:2]
        elif last == "register_at_fork":
            yield node, [keyword.value for keyword in node.keywords]
        elif last in ("Thread", "Timer"):
            targets = [each.value for each in node.keywords if each.arg in ("target", "function")]
            yield node, targets


def is_guarded(given: ast.expr, tree: ast.AST) -> bool:
    """Whether it is `partial(guard.run, ...)`, or a name that is only ever given such a value."""
    if isinstance(given, ast.Attribute) and given.attr in GUARDED:
        return True
    if isinstance(given, ast.Call) and ast.unparse(given.func).split(".")[-1] == "partial":
        wrapped = given.args[0]
        return isinstance(wrapped, ast.Attribute) and wrapped.attr in GUARDED
    text = ast.unparse(given)
    if text.startswith("signal.SIG_") or text.endswith("._at_fork_reinit"):
        return True
    values = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and text in map(ast.unparse, node.targets)
    ]
    values = [value for value in values if ast.unparse(value) != "None"]
    return bool(values) and all(is_guarded(value, tree) for value in values)


def unguarded(path: str, tree: ast.AST) -> list[str]:
    if path.startswith(tuple(THEIR_OWN)):
        return []
    return [
        f"{path}:{call.lineno} {ast.unparse(call)}"
        for call, given in registrations(tree)
        for each in given
        if not is_guarded(each, tree) and f"{path}:{ast.unparse(each)}" not in THEIR_OWN
    ]


def test_everything_registered_goes_through_the_guard() -> None:
    assert [line for path, tree in sources() for line in unguarded(path, tree)] == []


def handed_on(tree: ast.AST) -> Iterator[ast.expr]:
    """Register functions of torch's that are not called here, but given to somebody."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    compared = {
        id(operand)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for operand in (node.left, *node.comparators)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in called | compared:
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name.startswith("register_") and name.endswith("_hook"):
                yield node


def not_put(path: str, tree: ast.AST) -> list[str]:
    """Those that are given to others than `put_hook` and `put_module_hook`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    puts = [call for call in calls if ast.unparse(call.func) in ("put_hook", "put_module_hook")]
    given = {ast.unparse(call.args[1]) for call in puts}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and given & set(map(ast.unparse, node.targets)):
            given.add(ast.unparse(node.value))
    return [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for node in handed_on(tree)
        if ast.unparse(node) not in given and not path.startswith(tuple(THEIR_OWN))
    ]


def test_hooks_are_put_by_those_who_take_them_away_again() -> None:
    assert [line for path, tree in sources() for line in not_put(path, tree)] == []
    assert not_put("new.py", ast.parse("mine(model.register_forward_hook, self._seen)"))


def test_the_rule_can_fail() -> None:
    for bad in (
        "model.register_forward_hook(self._seen)",
        "atexit.register(self.close)",
        "os.register_at_fork(after_in_child=forked)",
        "signal.signal(signal.SIGTERM, self._on_signal)",
        "threading.Thread(target=self._run)",
    ):
        assert unguarded("session/new.py", ast.parse(bad)), bad
    good = "run = partial(self._guard.attempt, self._run)\nthreading.Thread(target=run)"
    assert unguarded("session/new.py", ast.parse(good)) == []


def test_there_is_one_guard() -> None:
    guards = [path for path, _ in sources() if path.endswith("guard.py")]
    assert guards == ["core/guard.py"]


def test_the_places_that_are_let_off_are_there() -> None:
    names = [path for path, _ in sources()]
    places = [each.split(":")[0] for each in THEIR_OWN]
    assert [each for each in places if not any(name.startswith(each) for name in names)] == []
