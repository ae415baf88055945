"""Writing an incident: files go to a folder `*.partial`; renaming it makes the incident.

The format is that of store/incident_format.py.
"""

import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradsight.core.files import finish_folder, remove_if_empty, sync_path
from gradsight.store.incident_format import DOCUMENT, describe_file, encode_document

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
        self._files[name] = describe_file(file)

    def finish(self, name: str, incident: Mapping[str, Any]) -> Path:
        """Write incident.json and make it all one folder of this name; an older one is replaced."""
        file = self._partial / DOCUMENT
        text = encode_document({**incident, "files": self._files})
        file.write_text(text, encoding="utf-8")
        sync_path(file)
        target = self._folder / name
        finish_folder(self._partial, target)
        return target

    def discard(self) -> None:
        """It was no incident after all."""
        shutil.rmtree(self._partial, ignore_errors=True)
        remove_if_empty(self._folder)


def remove_leftovers(folder: Path, rank: int) -> None:
    """What a killed process of this rank was writing when it ended."""
    for partial in folder.glob(f"*-rank{rank}.partial"):
        shutil.rmtree(partial, ignore_errors=True)
