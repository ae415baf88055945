"""JSON files of ours: they know their own checksum, and the version that can read them. No torch.

A document is an object with three keys more than what was written:

    format      1: written without a checksum, before there was one; 2: with one
    checksum    crc32 of everything else, as JSON with sorted keys and without spaces
    reader      the first version of Gradsight that can read it

A document without these keys is an old one, and is taken as it is. One that says format 2 and has
no checksum is damaged: a flipped byte in the key's name must not make an old document of it.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from gradsight.core import limits
from gradsight.core.places import read_file
from gradsight.errors import RunError

FORMAT = 2
READER = "0.2.0"
"""The first version that reads documents of this format."""
_OURS = ("format", "checksum", "reader")


def document_text(body: Mapping[str, object]) -> str:
    """A document as it is written.

    >>> load_document(document_text({"loss": 0.5}).encode(), "config.json")
    {'loss': 0.5}
    """
    whole = {"format": FORMAT, "reader": READER, **body}
    return json.dumps({**whole, "checksum": _checksum(whole)}, indent=1)


def read_document(root: Path, file: str | PurePath) -> dict[str, Any]:
    """A document below a folder that may be a stranger's; an error where it is not as written."""
    try:
        data = read_file(root, file, limits.DOCUMENT_BYTES)
    except OSError as error:
        raise RunError(f"{root / file} cannot be read: {error.strerror}") from error
    return load_document(data, str(root / file))


def load_document(data: bytes, name: str) -> dict[str, Any]:
    """What a document holds; `name` is what errors call it."""
    whole = load_object(data, name)
    number = whole.get("format", 1)
    if isinstance(number, int) and number > FORMAT and _is_intact(whole):
        needed = whole.get("reader")
        raise RunError(f"{name} was written by a newer Gradsight: it takes {needed!r} to read it")
    claimed = whole.pop("checksum", None)
    if claimed is None and number != 1:
        raise RunError(f"{name} is damaged: it has lost its checksum")
    if claimed is not None and claimed != _checksum(whole):
        raise RunError(f"{name} is damaged: its checksum is {_checksum(whole)}, not {claimed!r}")
    return {key: value for key, value in whole.items() if key not in _OURS}


def load_object(data: bytes, name: str) -> dict[str, Any]:
    """A JSON object of anybody's."""
    value = load_json(data, name)
    if not isinstance(value, dict):
        raise RunError(f"{name} should hold a JSON object, but holds a {type(value).__name__}")
    return value


def refuse_large(data: bytes, name: str) -> None:
    """Refuse JSON that is beyond the limits, before anything is made of it."""
    containers = data.count(b"[") + data.count(b"{")
    commas = data.count(b",")
    counts = [(len(data), limits.DOCUMENT_BYTES, "bytes")]
    counts += [(containers, limits.CONTAINERS, "lists and objects")]
    counts += [(commas, limits.COMMAS, "values")]
    for count, most, what in counts:
        if count > most:
            raise RunError(f"{name} has {count} {what}; at most {most} are read")


def load_json(data: bytes, name: str) -> Any:
    """What JSON of anybody's says, within the limits: nothing behind it has to expect more."""
    refuse_large(data, name)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{name} is damaged: it cannot be read as JSON: {error}") from error
    if _is_deeper(value, limits.DEPTH):
        raise RunError(f"{name} is nested deeper than {limits.DEPTH}, and is not read")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects lie deeper inside each other than this."""
    level = [value]
    for _ in range(depth + 1):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += [one for one in each.values() if isinstance(one, dict | list)]
            elif isinstance(each, list):
                inner += [one for one in each if isinstance(one, dict | list)]
        if not inner:
            return False
        level = inner
    return True


def _is_intact(whole: Mapping[str, object]) -> bool:
    """Whether a document's own checksum is that of the rest of it."""
    rest = {key: value for key, value in whole.items() if key != "checksum"}
    return whole.get("checksum") == _checksum(rest)


def _checksum(body: Mapping[str, object]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"crc32:{zlib.crc32(canonical.encode()):08x}"
