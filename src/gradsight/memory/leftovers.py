"""Nothing that was made in a fake pass survives it: caches of the user's are as they were before.

A mask in an `lru_cache`, a dict of a module or an attribute would be fake from then on, and the
next real step would fail, or go on without data. What survives is found by Python's collector:
everything from before is frozen for it, so that after the pass it knows of new objects only. Where
no fake tensor is among them, as mostly, nothing more is done.
"""

import functools
import gc
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

from torch._subclasses.fake_tensor import FakeTensor

from gradsight.core.source import owner_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
CONTAINERS = (dict, list, set, deque)
DEEPEST = 3
"""How far containers in containers are known from before.

The collector tracks a dict only once there is something in it that it tracks.
"""


def without_leftovers(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, after which no fake tensor that it made is left anywhere."""

    @functools.wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        before = _Before()
        already_frozen = gc.get_freeze_count() > 0
        gc.freeze()
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _let_go_of_frames(error)
            raise
        finally:
            gc.collect()  # of new objects alone, so this is quick
            new = gc.get_objects()
            gc.unfreeze()
            if any(type(thing) is FakeTensor for thing in new):
                _Leftovers(before, new).remove()
            if already_frozen:
                gc.freeze()

    return called


def _let_go_of_frames(error: BaseException | None) -> None:
    """Clear the variables of the frames that an error came through: they hold the fake model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _Before:
    """Names of modules, their classes and their objects with what they stood for."""

    def __init__(self) -> None:
        self.namespaces: dict[int, dict[str, Any]] = {}
        """By the identity of the module, class or object, or of its dict."""
        self.containers: set[int] = set()
        """Dicts, lists and sets that were there, below the names of the user's modules."""
        for module in list(sys.modules.values()):
            owner = _owner(module)
            if owner in ("user", "library", "made up"):
                self._remember(module)
            if owner in ("user", "made up"):
                self._remember_values(module)

    def _remember(self, thing: Any) -> dict[str, Any]:
        names = dict(vars(thing))
        self.namespaces[id(thing)] = names
        self.namespaces[id(vars(thing))] = names
        return names

    def _remember_values(self, module: ModuleType) -> None:
        for value in list(vars(module).values()):
            if isinstance(value, CONTAINERS):
                self._remember_containers(value, DEEPEST)
            elif isinstance(value, ModuleType) or not hasattr(value, "__dict__"):
                continue
            elif getattr(value, "__module__", None) == module.__name__:
                for inner in self._remember(value).values():
                    self._remember_containers(inner, DEEPEST)

    def _remember_containers(self, value: Any, depth: int) -> None:
        if not isinstance(value, CONTAINERS) or depth == 0:
            return
        self.containers.add(id(value))
        for inner in _values(value):
            self._remember_containers(inner, depth - 1)


def _owner(module: Any) -> str:
    if not isinstance(module, ModuleType):
        return "python"
    file = getattr(module, "__file__", None)
    return owner_of(file) if isinstance(file, str) else "made up"


class _Leftovers:
    """The new objects that lead to fake tensors, and how old ones let go of them."""

    def __init__(self, before: _Before, new: list[Any]) -> None:
        self._before = before
        self._new = {id(thing) for thing in new}
        self._fake = {id(thing) for thing in new if type(thing) is FakeTensor}
        self._own = {id(new), id(self), id(vars(self)), id(before)}
        self._spread_to_holders(new)

    def _spread_to_holders(self, new: list[Any]) -> None:
        """Add the new objects that hold fake ones, at whatever distance."""
        holders: dict[int, list[int]] = {}
        for thing in new:
            for held in gc.get_referents(thing):
                if id(held) in self._new:
                    holders.setdefault(id(held), []).append(id(thing))
        waiting = list(self._fake)
        while waiting:
            for holder in holders.get(waiting.pop(), ()):
                if holder not in self._fake:
                    self._fake.add(holder)
                    waiting.append(holder)

    def remove(self) -> None:
        """Make every old object that holds such a thing let go of it."""
        found = [
            (holder, held)
            for holder in gc.get_objects()
            if id(holder) not in self._new and id(holder) not in self._own
            for held in gc.get_referents(holder)
            if id(held) in self._fake
        ]
        for holder, held in found:
            self._release(holder, held)

    def _release(self, holder: Any, held: Any) -> None:
        if isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
        elif isinstance(holder, dict) and (owner := _owner_of_dict(holder)) is not None:
            self._restore(owner)
        elif isinstance(holder, CONTAINERS):
            self._take_out(holder, held)
        elif isinstance(holder, CellType):
            if not self._emptied(held):
                holder.cell_contents = None
        elif hasattr(holder, "__dict__"):
            self._restore(holder)
        else:
            self._emptied(held)

    def _restore(self, owner: Any) -> None:
        """Give the names that stand for fake things their values from before."""
        before = self._before.namespaces.get(id(owner))
        for name, value in list(vars(owner).items()):
            if id(value) not in self._fake:
                continue
            if before is not None and before.get(name) is value:
                self._empty(value)  # a container from before, with something new in it
            elif before is not None and name in before:
                setattr(owner, name, before[name])
            elif before is not None:
                delattr(owner, name)
            elif not self._emptied(value):
                # Nobody knows what stood there; a cache on an object mostly begins as None.
                setattr(owner, name, None)

    def _take_out(self, container: Any, held: Any) -> None:
        """Take a thing out of a container from before; one from before itself is emptied."""
        if id(held) in self._before.containers:
            self._empty(held)
        elif isinstance(container, dict):
            for key in [key for key, value in container.items() if value is held]:
                del container[key]
        elif isinstance(container, list):
            container[:] = [value for value in container if value is not held]
        else:
            container.remove(held)

    def _emptied(self, held: Any) -> bool:
        """Whether this is a container, which is then emptied of fake things."""
        if isinstance(held, CONTAINERS):
            self._empty(held)
            return True
        return False

    def _empty(self, container: Any) -> None:
        for held in list(_values(container)):
            if id(held) in self._fake:
                self._take_out(container, held)


def _owner_of_dict(names: dict[Any, Any]) -> Any:
    """The module, class, function or object whose names a dict holds; None: it is a plain one."""
    for holder in gc.get_referrers(names):
        if isinstance(holder, type):
            if any(held is names for held in gc.get_referents(holder)):
                return holder
        elif isinstance(holder, ModuleType | FunctionType):
            if getattr(holder, "__dict__", None) is names:
                return holder
        elif not isinstance(holder, CONTAINERS) and getattr(holder, "__dict__", None) is names:
            return holder
    return None


def _values(container: Any) -> Iterator[Any]:
    return iter(container.values() if isinstance(container, dict) else container)
