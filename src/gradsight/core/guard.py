"""The border: whatever torch, a thread, the interpreter or the user calls of ours goes through it.

Who makes a fault is told of, and out; hooks stay until `close`, as torch may be calling them."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from threading import RLock, get_ident
from time import perf_counter
from traceback import extract_tb
from typing import Any, NoReturn, TypeVar, cast

from gradsight.errors import GradsightError, in_one_line

_Method = TypeVar("_Method", bound=Callable[..., Any])

lock: Any = RLock()  # held while something of torch's or Python's is replaced by ours, or put back
spent: dict[int, float] = {}  # by thread: the seconds that it was on our side of the border
pauses: list[Any] = [bool]  # while the last of these says yes, nothing of ours runs


def register_at_fork(**actions: Any) -> None:
    """Call `os.register_at_fork` where it exists: Windows cannot fork a process."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**actions)


register_at_fork(after_in_child=lock._at_fork_reinit)


class Guard:
    """Keeps an instrument's faults from training. KeyboardInterrupt and SystemExit pass."""

    def __init__(self, problems: Any, key: str, what: str, passing: Any = ()) -> None:
        self.faults = 0
        self._told = (problems, key, what)
        self._passing = passing
        self._at_end: list[tuple[Any, tuple[Any, ...]]] = []

    def run(self, action: Any, *args: Any, **kwargs: Any) -> Any:
        """What the action returns; None where it fails, after any fault, and in a capture."""
        return None if self.faults or pauses[-1]() else self.attempt(action, *args, **kwargs)

    def attempt(self, action: Any, *args: Any, **kwargs: Any) -> Any:
        """The same, also after a fault."""
        grad_mode = getattr(sys.modules.get("torch"), "is_grad_enabled", bool)
        before, began = grad_mode(), spent.get(get_ident(), 0.0) - perf_counter()
        try:
            return action(*args, **kwargs)
        except Exception as error:
            if isinstance(error, self._passing) or getattr(error, "passes_guard", False):
                raise
            self.faults += 1
            self._tell(error)
        finally:
            spent[get_ident()] = began + perf_counter()  # what is inside counts once
            if grad_mode() != before:  # an interrupt may come in the middle of no_grad
                sys.modules["torch"]._C._set_grad_enabled(before)

    def at_end(self, action: Any, *args: Any) -> None:
        """Have `close` do this too, before what was left to it earlier."""
        self._at_end.append((action, args))

    def close(self) -> None:
        """Do what was left for the end, whatever fails or interrupts; what fails, once more."""
        try:
            while self._at_end:
                (action, args), faults = self._at_end.pop(), self.faults
                self.attempt(action, *args)
                if self.faults > faults:
                    self.attempt(action, *args)
        finally:
            if self._at_end:
                self.close()

    def _tell(self, error: Exception) -> None:
        problems, key, text = self._told
        try:
            at = extract_tb(error.__traceback__)[-1]
            text += f": {type(error).__name__}: {error} ({at.name}, {at.filename}:{at.lineno})"
            problems.report(key, text)
        except Exception:
            with suppress(Exception):
                print(f"gradsight: {ascii(text)[1:-1]}", file=sys.stderr, flush=True)


def put_back(users: list[Any], user: object, get: Any, put: Any, pair: Any) -> None:
    """Behind the last user put back (ours, original), unless somebody has replaced ours."""
    with lock:
        users[:] = [each for each in users if each is not user]
        if not users and get() is pair[0]:
            put(pair[1])


def raise_as_gradsight_error(error: Exception, what: str) -> NoReturn:
    """Raise an error of Gradsight's own work so that the user gets it, past every guard."""
    raised = error
    if not isinstance(error, GradsightError) and type(error).__name__ != "OutOfMemoryError":
        raised = GradsightError(f"{what}: {in_one_line(error)}")
    setattr(raised, "passes_guard", True)  # noqa: B010
    if raised is error:
        raise error
    raise raised from error


def entry(what: str) -> Callable[[_Method], _Method]:
    """Make a method that torch or the user calls raise no other errors than GradsightErrors.

    If it fails, `self._guard` is closed first, which puts back what was changed.
    """

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except BaseException as error:
                self._guard.close()
                if isinstance(error, Exception):
                    raise_as_gradsight_error(error, what)
                raise

        return cast("_Method", guarded)

    return decorate
