"""Incidents on disk: a folder that is there whole or not at all, of JSON and safetensors only. No
torch, no pickle.

    incident.json           {"format", "version", "crc32", "incident": what happened, and the other files' sizes and checksums}
    ring.safetensors        the last steps' statistics
    batch.safetensors       with recorder="batch": the tensors of the calls of the model, whose structure is in incident.json
    parameters.safetensors  with recorder="batch": parameters and buffers as they were

Files go to a folder `*.partial` and are made durable one by one; renaming it is what makes the
incident.
"""

import itertools
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradsight.core.files import finish_folder, remove_if_empty, sync_path
from gradsight.errors import RunError

FORMAT, VERSION = "gradsight-incident", 1
DOCUMENT = "incident.json"
_BLOCK = 1 << 22
_numbers = itertools.count()


class Bundle:
    """An incident being written."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder = folder
        self._partial = folder / f"{os.getpid()}-{next(_numbers)}-rank{rank}.partial"
        self._files: dict[str, dict[str, int]] = {}
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)

    def add(self, name: str, write: Callable[[Path], None]) -> None:
        """One file, written by somebody who knows how."""
        file = self._partial / name
        write(file)
        sync_path(file)
        self._files[name] = {"bytes": file.stat().st_size, "crc32": _checksum(file)}

    def finish(self, name: str, incident: Mapping[str, Any]) -> Path:
        """Write the incident's own file, and make it all one folder of this name; an older one of
        that name is replaced.
        """
        body = {**incident, "files": self._files}
        document = {
            "format": FORMAT,
            "version": VERSION,
            "crc32": _checksum_of(body),
            "incident": body,
        }
        file = self._partial / DOCUMENT
        file.write_text(json.dumps(document, indent=1, allow_nan=False), encoding="utf-8")
        sync_path(file)
        target = self._folder / name
        finish_folder(self._partial, target)
        return target

    def discard(self) -> None:
        """It was no incident after all."""
        shutil.rmtree(self._partial, ignore_errors=True)
        remove_if_empty(self._folder)


def read_document(path: Path) -> dict[str, Any]:
    """What an incident's own file says, proven whole."""
    file = path / DOCUMENT
    if not path.is_dir():
        raise RunError(f"there is no incident at {path}")
    if not file.is_file():
        raise RunError(f"{path} is not an incident: it has no {DOCUMENT}")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is damaged: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RunError(f"{file} is not an incident of Gradsight's")
    if document.get("version") != VERSION:
        raise RunError(
            f"{file} has format version {document.get('version')}, and this Gradsight reads version {VERSION}; "
            "read it with the Gradsight that wrote it"
        )
    body = document.get("incident")
    if not isinstance(body, dict) or document.get("crc32") != _checksum_of(body):
        raise RunError(f"{file} is damaged: its checksum does not fit its text")
    return body


def checked_file(path: Path, body: Mapping[str, Any], name: str) -> Path | None:
    """A file of an incident, proven whole; None where the incident has no such file."""
    known = body.get("files", {}).get(name)
    if known is None:
        return None
    file = path / name
    if not file.is_file():
        raise RunError(f"{path} is damaged: {name} is missing")
    size = file.stat().st_size
    if size != known["bytes"]:
        raise RunError(f"{file} is damaged: it has {size} bytes, and {known['bytes']} were written")
    if _checksum(file) != known["crc32"]:
        raise RunError(f"{file} is damaged: its checksum does not fit what was written")
    return file


def remove_leftovers(folder: Path, rank: int) -> None:
    """What a killed process of this rank was writing when it ended."""
    for partial in folder.glob(f"*-rank{rank}.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def _checksum_of(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as handle:
        while block := handle.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
