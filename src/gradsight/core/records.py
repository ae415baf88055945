"""Frozen records out of JSON that a stranger may have written: every field of its type. No torch.

The counterpart of `plain`: what that wrote comes back. A field that is missing takes its default; a
field that the record does not have, or a value of another type, is an error that names it.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from gradsight.core import limits
from gradsight.errors import RunError

T = TypeVar("T")
Read = Callable[[Any], Any]
"""Takes a value of JSON, gives that of a field; raises _Wrong."""
_NOT_FINITE = {"nan", "inf", "-inf"}
_NOTHING = dataclasses.MISSING


class _Wrong(Exception):
    """A value that does not fit, and the way to it from outside to inside."""

    def __init__(self, expected: str, value: object) -> None:
        super().__init__(expected)
        self.expected = expected
        self.value = value
        self.way: list[str] = []


def read_record(kind: type[T], value: object, name: str) -> T:
    """A record of this kind; `name` is what errors call the place where it was found."""
    record: T = read_value(kind, value, name)
    return record


def read_value(kind: Any, value: object, name: str) -> Any:
    """A value of any type that a field may have, such as `int | None` or `tuple[str, ...]`."""
    try:
        return _reader(kind)(value)
    except _Wrong as wrong:
        way = "".join(reversed(wrong.way)).removeprefix(".") or "it"
        came = f"{type(wrong.value).__name__} {str(wrong.value)[:60]!r}"
        raise RunError(
            f"{name} is malformed: {way} should be {wrong.expected}, but is {came}"
        ) from None


@cache
def _reader(kind: Any) -> Read:
    """How a value of JSON becomes one of this type; made once for each."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if dataclasses.is_dataclass(kind):
        return _record(kind)
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _one_of([_reader(each) for each in inner], " or ".join(_words(kind)))
    if origin is tuple and inner[-1] is not ...:
        return _fixed([_reader(each) for each in inner])
    if origin is tuple:
        return _several(_reader(inner[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_reader(inner[1]))
    raise TypeError(f"no rule for a field of type {kind}")


def _words(kind: Any) -> list[str]:
    names = [getattr(each, "__name__", str(each)) for each in typing.get_args(kind)]
    return ["nothing" if name == "NoneType" else name for name in names]


def _record(kind: Any) -> Read:
    hints = typing.get_type_hints(kind)
    fields = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}
    needed = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is _NOTHING and field.default_factory is _NOTHING
    }

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Wrong("an object", value)
        # Two lookups of sets instead of one per field: a manifest has many thousand records.
        if not needed <= value.keys() <= fields.keys():
            odd = sorted(needed - value.keys()) or sorted(value.keys() - fields.keys())
            raise _Wrong(f"an object with the fields of a {kind.__name__} ({odd[0]!r})", value)
        made = {}
        for name, each in value.items():
            try:
                made[name] = fields[name](each)
            except _Wrong as wrong:
                wrong.way.append(f".{name}")
                raise
        return kind(**made)

    return read


def _one_of(readers: list[Read], expected: str) -> Read:
    def read(value: Any) -> Any:
        for reader in readers:
            try:
                return reader(value)
            except _Wrong as wrong:
                if wrong.way:  # it was the right kind, and something in it is not
                    raise
        raise _Wrong(expected, value)

    return read


def _several(reader: Read) -> Read:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise _Wrong("a list", value)
        made = []
        for place, each in enumerate(value):
            try:
                made.append(reader(each))
            except _Wrong as wrong:
                wrong.way.append(f"[{place}]")
                raise
        return tuple(made)

    return read


def _fixed(readers: list[Read]) -> Read:
    def read(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(readers):
            raise _Wrong(f"a list of {len(readers)}", value)
        return tuple(reader(each) for reader, each in zip(readers, value, strict=True))

    return read


def _mapping(reader: Read) -> Read:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Wrong("an object", value)
        made = {}
        for key, each in value.items():
            try:
                made[key] = reader(each)
            except _Wrong as wrong:
                wrong.way.append(f"[{str(key)[:60]!r}]")
                raise
        return made

    return read


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong("text", value)
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not -limits.NUMBER <= value <= limits.NUMBER:
        raise _Wrong("a whole number", value)
    return value


def _number(value: Any) -> float:
    """A number; one that is not finite is kept as text."""
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    if type(value) is float or (type(value) is int and abs(value) <= limits.NUMBER):
        return float(value)
    raise _Wrong("a number", value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("true or false", value)
    return value


def _none(value: Any) -> None:
    if value is not None:
        raise _Wrong("nothing", value)


def _anything(value: Any) -> Any:
    return value


_PLAIN: dict[Any, Read] = {
    Any: _anything,
    str: _text,
    int: _whole,
    float: _number,
    bool: _truth,
    type(None): _none,
}
