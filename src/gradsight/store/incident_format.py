"""An incident on disk: a folder that is there whole or not at all, of JSON and safetensors only.

    incident.json           {"format", "version", "crc32", "incident"}: what happened, and the other
                            files' sizes and checksums
    ring.safetensors        the last steps' statistics
    batch.safetensors       with recorder="batch": the tensors of the calls of the model, whose
                            structure is in incident.json
    parameters.safetensors  with recorder="batch": parameters and buffers as they were

No torch, no pickle: whoever is sent an incident can open it without running the sender's code.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsight.errors import RunError, WrongPlace

FORMAT = "gradsight-incident"
VERSION = 1
DOCUMENT = "incident.json"
RING = "ring.safetensors"
BATCH = "batch.safetensors"
PARAMETERS = "parameters.safetensors"
_BLOCK = 1 << 22


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


def read_document(path: Path) -> dict[str, Any]:
    """The incident in incident.json, proven whole."""
    file = path / DOCUMENT
    if not path.is_dir():
        raise WrongPlace(f"there is no incident at {path}")
    if not file.is_file():
        raise WrongPlace(f"{path} is not an incident: it has no {DOCUMENT}")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is damaged: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise WrongPlace(f"{file} is not an incident of Gradsight's")
    if document.get("version") != VERSION:
        raise WrongPlace(
            f"{file} has format version {document.get('version')}, "
            f"and this Gradsight reads version {VERSION}; read it with the Gradsight that wrote it"
        )
    body = document.get("incident")
    if not isinstance(body, dict) or document.get("crc32") != checksum_of(body):
        raise RunError(f"{file} is damaged: its checksum does not fit its text")
    return body


def describe_file(file: Path) -> dict[str, int]:
    """The size and checksum of a file, as incident.json keeps them."""
    return {"bytes": file.stat().st_size, "crc32": checksum_of_file(file)}


def checked_file(path: Path, body: Mapping[str, Any], name: str) -> Path | None:
    """A file of an incident, proven whole; None where the incident has no such file."""
    known = body.get("files", {}).get(name)
    if known is None:
        return None
    file = path / name
    if not file.is_file():
        raise RunError(f"{path} is damaged: {name} is missing")
    size = file.stat().st_size
    if size != known["bytes"]:  # asked first, as it needs no reading
        raise RunError(f"{file} is damaged: it has {size} bytes, and {known['bytes']} were written")
    if checksum_of_file(file) != known["crc32"]:
        raise RunError(f"{file} is damaged: its checksum does not fit what was written")
    return file


def checksum_of(body: Mapping[str, Any]) -> int:
    """The checksum of an incident, whatever the order of its keys."""
    # Of the values, not of the text: its layout and the order of its keys do not matter.
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def checksum_of_file(file: Path) -> int:
    """The checksum of a file's bytes."""
    value = 0
    with file.open("rb") as handle:
        while block := handle.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
