"""What modules hold beside parameters and buffers: containers, arrays, objects; put back."""

import dis
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any
from weakref import ProxyTypes

import numpy as np
import torch
from torch import Tensor, nn

from gradsight.core.layouts import is_in_memory
from gradsight.core.shards import local_part
from gradsight.core.source import owner_of

PutBack = Callable[[], None]
_STORES = ("STORE_GLOBAL", "DELETE_GLOBAL")
OF_TORCH = frozenset(vars(nn.Module()))
"""Names of attributes that every module has: others keep those."""
MOST_ENTRIES = 10_000
"""A longer container gets its entries back, but what is written to them is not looked for."""
MOST_VALUES = 100_000
"""Values that are looked through in all: attributes may lead to a whole data set."""


@contextmanager
def contents_kept(root: nn.Module) -> Iterator[None]:
    """Restore the attributes of modules after a pass, with the contents of containers.

    Also restore what the script's code writes during the pass: global variables, variables of
    enclosing functions (closures) and class attributes.
    """
    held = [*_held_by(root), *_held_by_code(root)]
    try:
        yield
    finally:
        for put_back in held:
            put_back()


def hidden_modules(root: nn.Module) -> list[nn.Module]:
    """Return the modules that attributes lead to and that the model does not list as its own.

    Scripts hide a teacher or a moving average in a list, so that no optimizer gets its parameters.
    """
    seen = _parts_of(root)
    found: list[nn.Module] = []
    waiting = [value for module in root.modules() for value in _attributes(module)]
    while waiting and len(seen) < MOST_VALUES:
        value = waiting.pop()
        if id(value) in seen or type(value) in ProxyTypes:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found.append(value)
            waiting += [*value.children(), *_attributes(value)]
        elif len(entries := _entries(value)) <= MOST_ENTRIES:
            waiting += entries
    return found


def _is_iterator(value: Any) -> bool:
    # A proxy has the methods of every class, and raises an error if its object is gone.
    return type(value) not in ProxyTypes and isinstance(value, Iterator)


def advanced_by(root: nn.Module) -> str | None:
    """Return the name of an iterator that a pass may advance, or None if there is none.

    Gradsight cannot rewind an iterator. An open file is an iterator too.
    """
    for name, module in root.named_modules():
        for attribute, value in list(vars(module).items()):
            if attribute not in OF_TORCH and _is_iterator(value):
                return f"{attribute} of {f'module {name}' if name else 'the model'}"
    for function in _code_of(root):
        if any(map(_is_iterator, _reached_by(function))):
            return f"that {function.__qualname__} uses"
    return None


def _held_by(root: nn.Module) -> Iterator[PutBack]:
    seen = _parts_of(root)
    for module in root.modules():
        for value in _attributes(module):
            yield from _held(value, seen)


def _held_by_code(root: nn.Module) -> Iterator[PutBack]:
    """Yield functions that undo what the script's methods, and functions they call, write."""
    for kind in {kind for module in root.modules() for kind in type(module).__mro__}:
        if _methods(kind):
            yield _kept_attributes(kind)
    seen: set[int] = set()
    for function in _code_of(root):
        yield from _kept_names(function.__globals__, _names(function.__code__, _STORES))
        yield from (_kept_cell(cell) for cell in function.__closure__ or ())
        for value in _reached_by(function):
            if id(value) not in seen:
                seen.add(id(value))
                entries = vars(value) if _is_object_of_user(value) else value
                is_container = isinstance(entries, list | dict | set | deque)
                if is_container and len(entries) <= MOST_ENTRIES:
                    yield _kept_entries(entries)


def _code_of(root: nn.Module) -> list[FunctionType]:
    """The script's own methods of modules, and its own functions that these use."""
    kinds = {kind for module in root.modules() for kind in type(module).__mro__}
    functions = [function for kind in kinds for function in _methods(kind)]
    for function in functions:  # grows meanwhile
        reached = (each for each in _reached_by(function) if isinstance(each, FunctionType))
        functions += [each for each in reached if _is_of_user(each) and each not in functions]
        if len(functions) > MOST_ENTRIES:
            break
    return functions


def _methods(kind: type) -> list[FunctionType]:
    """The methods of a class that are the script's own."""
    functions = []
    for each in vars(kind).values():
        if isinstance(each, staticmethod | classmethod):
            each = each.__func__
        elif isinstance(each, property):
            each = each.fget
        # Such as a method that torch.no_grad() or torch.autocast() decorates.
        inner = inspect.unwrap(each) if callable(each) else each
        if isinstance(inner, FunctionType) and _is_of_user(inner):
            functions.append(inner)
    return functions


def _reached_by(function: FunctionType) -> Iterator[Any]:
    """Yield the objects that a function reads from global or closure variables."""
    for name in _names(function.__code__, ("LOAD_GLOBAL",)):
        if name in function.__globals__:
            yield function.__globals__[name]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a cell that nothing was put into yet
            yield cell.cell_contents


def _is_of_user(function: FunctionType) -> bool:
    return owner_of(function.__code__.co_filename) == "user"


@lru_cache(maxsize=4096)
def _names(code: CodeType, instructions: tuple[str, ...]) -> frozenset[str]:
    """Return the names that these bytecode instructions use as arguments."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname in instructions}
    # Generator expressions, comprehensions and lambdas have code of their own.
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant, instructions)
    return frozenset(found)


def _kept_names(names: dict[str, Any], written: frozenset[str]) -> Iterator[PutBack]:
    if written:
        saved = {name: names[name] for name in written if name in names}
        yield lambda: names.update(saved)


def _kept_cell(cell: Any) -> PutBack:
    try:
        saved = cell.cell_contents
    except ValueError:
        return lambda: None
    return lambda: setattr(cell, "cell_contents", saved)


def _kept_attributes(kind: type) -> PutBack:
    saved = dict(vars(kind))

    def put_back() -> None:
        for name, value in saved.items():
            if vars(kind).get(name) is not value:
                setattr(kind, name, value)

    return put_back


def _parts_of(root: nn.Module) -> set[int]:
    return {id(each) for each in (*root.modules(), *root.parameters(), *root.buffers())}


def _attributes(module: nn.Module) -> list[Any]:
    return [value for name, value in list(vars(module).items()) if name not in OF_TORCH]


def _held(value: Any, seen: set[int]) -> Iterator[PutBack]:
    """How to put back this value and all that is in it."""
    if id(value) in seen or len(seen) > MOST_VALUES or type(value) in ProxyTypes:
        return
    seen.add(id(value))
    if isinstance(value, Tensor | np.ndarray):
        if not isinstance(value, Tensor) or (value.layout is torch.strided and is_in_memory(value)):
            yield _kept_values(value)
        return
    if isinstance(value, nn.Module):
        yield from _held_by_hidden(value, seen)
        return
    if isinstance(value, list | dict | set | deque):
        yield _kept_entries(value)
    elif _is_object_of_user(value):
        yield _kept_entries(vars(value))
    entries = _entries(value)
    if len(entries) <= MOST_ENTRIES:
        for entry in entries:
            yield from _held(entry, seen)


def _entries(value: Any) -> list[Any]:
    """Return what a container or an object of the script holds."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | deque):
        return list(value)
    return list(vars(value).values()) if _is_object_of_user(value) else []


def _is_object_of_user(value: Any) -> bool:
    """Whether it is an object, such as a counter, of a class that the script defines."""
    if isinstance(value, type | nn.Module | Tensor):
        return False
    defined_in = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    is_user = defined_in is not None and owner_of(defined_in) == "user"
    return is_user and hasattr(value, "__dict__")


def _held_by_hidden(module: nn.Module, seen: set[int]) -> Iterator[PutBack]:
    """A module that is nobody's child: its buffers change as those of others do."""
    # Its parameters do not: what an operation writes to them is put back by `writes_undone`.
    seen |= {id(each) for each in module.parameters(recurse=False)}
    for entries in (vars(module), module._buffers, module._parameters):
        yield _kept_entries(entries)
    for value in (*module._buffers.values(), *module.children(), *_attributes(module)):
        yield from _held(value, seen)


def _kept_values(value: Any) -> PutBack:
    if isinstance(value, np.ndarray):
        array = value.copy()
        return lambda: np.copyto(value, array)
    saved = value.detach().clone()

    def put_back() -> None:
        if not torch.equal(local_part(value), local_part(saved)):
            with torch.no_grad():
                value.copy_(saved)

    return put_back


def _kept_entries(value: Any) -> PutBack:
    saved = value.copy()

    def put_back() -> None:
        if _are_the_same(value, saved):
            return
        value.clear()
        fill = value.extend if isinstance(value, list | deque) else value.update
        fill(saved)

    return put_back


def _are_the_same(one: Any, other: Any) -> bool:
    """Whether these containers hold the same objects, which may compare as they like."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        one, other = [*one, *one.values()], [*other, *other.values()]
    if isinstance(one, set):
        return {id(each) for each in one} == {id(each) for each in other}
    return all(mine is theirs for mine, theirs in zip(one, other, strict=True))
