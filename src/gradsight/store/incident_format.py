"""An incident on disk: a folder that is there whole or not at all, of JSON and safetensors only.

    incident.json           {"format", "version", "crc32", "incident"}: what happened, and the other
                            files' sizes and checksums
    batch.safetensors       with recorder="batch": the tensors of the calls of the model, whose
                            structure is in incident.json
    parameters.safetensors  with recorder="batch": parameters and buffers as they were

No torch, no pickle: whoever is sent an incident can open it without running the sender's code.
"""

import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gradsight.core import limits
from gradsight.core.documents import load_json, load_object
from gradsight.core.places import open_file, read_file
from gradsight.core.records import read_value
from gradsight.errors import RunError, UsageError, WrongPlace

FORMAT = "gradsight-incident"
VERSION = 1
DOCUMENT = "incident.json"
BATCH = "batch.safetensors"
PARAMETERS = "parameters.safetensors"
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class _StoredFile:
    """How large a file of an incident is, and its checksum."""

    bytes: int
    crc32: int


_TYPES: dict[str, Any] = {
    "step": int | None,
    "rank": int | None,
    "first_pass": int | None,
    "scale": float | None,
    "code": str | None,
    "reason": str | None,
    "replay": str | None,
    "parameters": str | None,
    "kind": str | None,
    "files": Mapping[str, _StoredFile] | None,
    "state": Mapping[str, tuple[tuple[int, ...], str]] | None,
    "passes": tuple[Mapping[str, Any], ...] | None,
    "versions": Mapping[str, str] | None,
}
"""What is used of an incident, and what it has to be; the diagnosis has a reader of its own."""


def encode_document(body: Mapping[str, Any]) -> str:
    """The text of incident.json for an incident."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "crc32": checksum_of(body),
        "incident": body,
    }
    # NaN is no JSON: other programs would refuse the file.
    return json.dumps(document, indent=1, allow_nan=False)


def read_incident(path: Path) -> dict[str, Any]:
    """The incident in incident.json, proven whole."""
    if not path.is_dir():
        raise WrongPlace(f"there is no incident at {path}")
    try:
        data = read_file(path, DOCUMENT, limits.DOCUMENT_BYTES)
    except FileNotFoundError:
        raise WrongPlace(f"{path} is not an incident: it has no {DOCUMENT}") from None
    except OSError as error:
        raise RunError(f"{path / DOCUMENT} cannot be read: {error.strerror}") from error
    return decode_document(data, path / DOCUMENT)


def decode_document(data: bytes, file: Path) -> dict[str, Any]:
    """The incident in the text of incident.json, whose every part is of the type it should be."""
    document = load_json(data, str(file))
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise WrongPlace(f"{file} is not an incident of Gradsight's")
    if document.get("version") != VERSION:
        raise WrongPlace(
            f"{file} has format version {document.get('version')!r}, "
            f"and this Gradsight reads version {VERSION}; read it with the Gradsight that wrote it"
        )
    body = document.get("incident")
    if not isinstance(body, dict) or document.get("crc32") != checksum_of(body):
        raise RunError(f"{file} is damaged: its checksum does not fit its text")
    for key, kind in _TYPES.items():
        read_value(kind, body.get(key), f"{key!r} of {file}")
    return body


def describe_file(path: Path, name: str) -> dict[str, int]:
    """The size and checksum of a file of an incident, as incident.json keeps them."""
    with os.fdopen(open_file(path, name), "rb") as handle:
        return {"bytes": os.fstat(handle.fileno()).st_size, "crc32": _checksum_of(handle)}


def checked_file(path: Path, body: Mapping[str, Any], name: str) -> Path | None:
    """A file of an incident, proven whole; None where the incident has no such file."""
    known = (body.get("files") or {}).get(name)
    if known is None:
        return None
    file = path / name
    try:
        with os.fdopen(open_file(path, name), "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if size != known["bytes"]:  # asked first, as it needs no reading
                raise RunError(
                    f"{file} is damaged: it has {size} bytes, and {known['bytes']} were written"
                )
            if _checksum_of(handle) != known["crc32"]:
                raise RunError(f"{file} is damaged: its checksum does not fit what was written")
    except FileNotFoundError:
        raise RunError(f"{path} is damaged: {name} is missing") from None
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error
    return file


def refuse_large_files(path: Path, body: Mapping[str, Any]) -> None:
    """Refuse tensors that take more memory than a stranger is trusted with."""
    for name, known in (body.get("files") or {}).items():
        if known["bytes"] > limits.MODEL_BYTES:
            raise UsageError(
                f"{path / name} has {known['bytes']:,} bytes; more than {limits.MODEL_BYTES:,} are "
                "not loaded for a model of a run's own settings. Give the model with "
                "--build file.py:build"
            )


def batch_entries(path: Path, body: Mapping[str, Any]) -> int:
    """How many whole numbers (tokens, mostly) the batch of an incident has, by its header alone."""
    file = checked_file(path, body, BATCH)
    if file is None:
        raise RunError(f"{path} is damaged: it names no {BATCH}")
    with os.fdopen(open_file(path, BATCH), "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if length > limits.DOCUMENT_BYTES:
            raise RunError(f"{file} is damaged: its header claims {length} bytes")
        header = load_object(handle.read(length), str(file))
    entries = 0
    for tensor in header.values():
        if isinstance(tensor, dict) and tensor.get("dtype") in _WHOLE:
            shape = read_value(tuple[int, ...], tensor.get("shape"), f"a shape in {file}")
            entries += math.prod(max(0, length) for length in shape)
    return entries


_WHOLE = ("I64", "I32", "I16", "U64", "U32", "U16", "U8", "I8")
"""What safetensors calls the dtypes of tokens; random states are of the last ones, and small."""


def checksum_of(body: Mapping[str, Any]) -> int:
    """The checksum of an incident, whatever the order of its keys."""
    # Of the values, not of the text: its layout and the order of its keys do not matter.
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _checksum_of(handle: BinaryIO) -> int:
    """The checksum of a file's bytes."""
    value = 0
    while block := handle.read(_BLOCK):
        value = zlib.crc32(block, value)
    return value
