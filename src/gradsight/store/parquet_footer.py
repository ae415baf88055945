"""What a parquet file says of itself, read without a parquet library. No torch, no pyarrow.

The library ends the whole process on some footers that contradict themselves, and believes pages
that claim two gigabytes each. So a stranger's file is looked at first: a footer and the heads of
pages are structures of Thrift's compact protocol, a few numbers each.
"""

from dataclasses import dataclass
from typing import Any

from gradsight.core import limits

_MOST_COLUMNS = 32
_DEPTH = 12
_BYTE_ARRAY = 6
_CODECS = (0, 1)
"""None, and Snappy: what ours are of; neither unpacks to more than some twenty times its size."""

# Thrift's types: true and false in one, 8, 16, 32 and 64 bits, double, bytes, list, set, struct.
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_WHOLE = (4, 5, 6)

Fields = dict[int, Any]
"""The values of a structure by the number of the field."""


@dataclass(frozen=True, slots=True)
class FooterFacts:
    """What is asked of a score file before it is unpacked."""

    rows: int
    texts: tuple[str, ...]
    """The columns of texts."""


def read_footer(data: bytes, start: int) -> FooterFacts:
    """Check what a file would unpack to; ValueError where that is too much, or makes no sense.

    start: where the footer begins.
    """
    footer, _ = _Thrift(data, start).read()
    rows = _whole(footer, 3)
    leaves = _leaves(footer)
    if not 0 <= rows <= limits.SCORE_ROWS or not 0 < len(leaves) <= _MOST_COLUMNS:
        raise ValueError(f"it has {rows} rows and {len(leaves)} columns")
    groups = _structures(footer, 4)
    chunks = [chunk for group in groups for chunk in _structures(group, 1)]
    if any(len(_structures(group, 1)) != len(leaves) for group in groups):
        raise ValueError("its parts have not all columns")
    if sum(_whole(group, 3) for group in groups) != rows or len(groups) > limits.SCORE_ROWS:
        raise ValueError("its parts have other rows than the whole")
    unpacked = 0
    values = 0
    for chunk in chunks:
        facts = chunk.get(3)
        if not isinstance(facts, dict) or _whole(facts, 4) not in _CODECS:
            raise ValueError("it is packed in another way than ours")
        values += _whole(facts, 5)
        unpacked += _unpacked_bytes(data, facts, start)
        if unpacked > limits.SCORE_UNPACKED_BYTES or values > limits.SCORE_VALUES:
            raise ValueError(f"it unpacks to {unpacked} bytes and {values} values, or more")
    texts = [name for name, leaf in leaves.items() if leaf.get(1) == _BYTE_ARRAY]
    return FooterFacts(rows, tuple(texts))


def _leaves(footer: Fields) -> dict[str, Fields]:
    """The columns that hold values, by their names; those inside of lists by their own."""
    elements = _structures(footer, 2)[1:]
    names: dict[str, Fields] = {}
    for element in elements:
        name = element.get(4)
        if not isinstance(name, bytes) or len(name) > 1000:
            raise ValueError("a column has no name")
        key = name.decode("utf-8", "strict")
        if element.get(5):  # it has columns below it
            continue
        if key in names:
            raise ValueError(f"two columns are called {key[:60]!r}")
        names[key] = element
    return names


def _unpacked_bytes(data: bytes, facts: Fields, end: int) -> int:
    """What the pages of a column unpack to, by their own heads."""
    size = _whole(facts, 7)
    position = min(facts.get(11) or _whole(facts, 9), _whole(facts, 9))
    last = position + size
    if not 4 <= position <= last <= end:
        raise ValueError("a column lies outside of the file")
    unpacked = 0
    while position < last:
        head, position = _Thrift(data, position).read()
        compressed = _whole(head, 3)
        if not 0 <= compressed <= last - position:
            raise ValueError("a page is longer than its column")
        position += compressed
        unpacked += max(0, _whole(head, 2))
        if unpacked > limits.SCORE_UNPACKED_BYTES:
            break
    return unpacked


def _whole(fields: Fields, number: int) -> int:
    value = fields.get(number)
    if type(value) is not int:
        raise ValueError("a number is missing in its footer")
    return value


def _structures(fields: Fields, number: int) -> list[Fields]:
    value = fields.get(number, [])
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError("a list is missing in its footer")
    return value


class _Thrift:
    """Reads one structure of the compact protocol."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position
        self._left = 1 << 20  # values, of which ours have some hundreds

    def read(self) -> tuple[Fields, int]:
        """The structure, and where it ends; ValueError where it is none."""
        try:
            return self._structure(0), self._position
        except IndexError:
            raise ValueError("its footer is cut off") from None

    def _structure(self, depth: int) -> Fields:
        if depth > _DEPTH:
            raise ValueError("its footer is nested too deeply")
        fields: Fields = {}
        number = 0
        while head := self._byte():
            step = head >> 4
            number = number + step if step else self._signed()
            fields[number] = self._value(head & 15, depth, in_list=False)
        return fields

    def _value(self, kind: int, depth: int, in_list: bool) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError("its footer is too long")
        if kind in (_TRUE, _FALSE):
            return self._byte() == _TRUE if in_list else kind == _TRUE
        if kind == _BYTE:
            return self._byte()
        if kind in _WHOLE:
            return self._signed()
        if kind == _STRUCT:
            return self._structure(depth + 1)
        if kind in (_LIST, _SET):
            head = self._byte()
            count = head >> 4
            if count == 15:
                count = self._unsigned()
            return [self._value(head & 15, depth + 1, in_list=True) for _ in range(count)]
        sizes = {_DOUBLE: 8}
        if kind != _BINARY and kind not in sizes:
            raise ValueError("its footer holds what no parquet file does")
        size = sizes.get(kind)
        if size is None:
            size = self._unsigned()
        value = self._data[self._position : self._position + size]
        self._position += size
        if len(value) < size:
            raise IndexError
        return value

    def _byte(self) -> int:
        value = self._data[self._position]
        self._position += 1
        return value

    def _unsigned(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("its footer holds a number without end")

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
