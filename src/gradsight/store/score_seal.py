"""The checksum inside a score file, and what a stranger's file is let unpack to. No torch.

A parquet file ends in its footer, which says where every page begins. Between the last page and the
footer, where no reader of parquet looks, stand twenty bytes: "GSscore1", the crc32 of all other
bytes of the file, and "1erocsSG". Both words are asked for: a flipped byte in one of them must not
make a file without a checksum of one that has it.
"""

import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsight.core import limits
from gradsight.core.places import read_file
from gradsight.errors import RunError

if TYPE_CHECKING:
    import pyarrow

_BEFORE = b"GSscore1"
_BEHIND = _BEFORE[::-1]
_CHECKSUM = struct.Struct("<I")
_END = struct.Struct("<I4s")
_PARQUET = b"PAR1"


def sealed(data: bytes) -> bytes:
    """A parquet file with its checksum in it."""
    start = footer_start(data)
    before = data[:start] + _BEFORE
    behind = _BEHIND + data[start:]
    return before + _CHECKSUM.pack(zlib.crc32(behind, zlib.crc32(before))) + behind


def read_sealed(file: Path) -> bytes:
    """The bytes of a score file, proven whole where it has a checksum; not through a link."""
    data = read_file(file.parent, file.name, limits.SCORE_FILE_BYTES)
    prove(data, str(file))
    return data


def prove(data: bytes, name: str) -> bool:
    """Whether a file has a checksum; an error where it does not fit, or was lost."""
    try:
        start = footer_start(data)
    except ValueError as error:
        raise RunError(f"{name} cannot be read: it is damaged, {error}") from error
    end = start - len(_BEHIND)
    place = end - _CHECKSUM.size
    words = (data[place - len(_BEFORE) : place] == _BEFORE, data[end:start] == _BEHIND)
    if not any(words):
        return False
    view = memoryview(data)
    checksum = zlib.crc32(view[end:], zlib.crc32(view[:place]))
    if not all(words) or data[place:end] != _CHECKSUM.pack(checksum):
        raise RunError(f"{name} cannot be read: it is damaged, its bytes do not fit its checksum")
    return True


def footer_start(data: bytes) -> int:
    """Where the footer of a parquet file begins; ValueError where it has none."""
    if len(data) < 12 or data[:4] != _PARQUET:
        raise ValueError("for it is no parquet file")
    length, magic = _END.unpack_from(data, len(data) - _END.size)
    start = len(data) - _END.size - length
    if magic != _PARQUET or start < len(_PARQUET):
        raise ValueError("for it is cut off")
    return int(start)


def as_plain_text(table: "pyarrow.Table", name: str) -> "pyarrow.Table":
    """A table whose texts were read as dictionaries, as text: a long one may stand in every row."""
    import pyarrow
    import pyarrow.compute as compute

    for place, field in enumerate(table.schema):
        if not pyarrow.types.is_dictionary(field.type):
            continue
        size = sum(_text_bytes(chunk, compute) for chunk in table.column(place).chunks)
        if size > limits.SCORE_UNPACKED_BYTES:
            raise RunError(f"{name} unpacks to {size} bytes of text: too many")
        plain = table.column(place).cast(field.type.value_type)
        table = table.set_column(place, field.with_type(field.type.value_type), plain)
    return table


def _text_bytes(chunk: Any, compute: Any) -> int:
    lengths = compute.binary_length(chunk.dictionary)
    return compute.sum(lengths.take(chunk.indices)).as_py() or 0
