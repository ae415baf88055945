"""Writing an incident: files go to a folder `*.partial`; renaming it makes the incident.

The format is that of store/incident_format.py.
"""

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradsight.core import rundir
from gradsight.core.files import (
    finish_folder,
    make_folder,
    remove_if_empty,
    remove_tree,
    sync_path,
    write_file,
)
from gradsight.core.places import names_in
from gradsight.errors import RunError
from gradsight.store.incident_format import DOCUMENT, describe_file, encode_document


class Bundle:
    """An incident being written, below a run directory."""

    def __init__(self, run_dir: Path, rank: int = 0) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / rundir.INCIDENTS
        # Not the process alone: several watches of one may write at a time.
        name = f"{os.getpid()}-{secrets.token_hex(4)}-rank{rank}.partial"
        self._partial = self._folder / name
        self._files: dict[str, dict[str, int]] = {}
        make_folder(self._partial, below=run_dir)

    def add(self, name: str, write: Callable[[Path], None]) -> None:
        """One file, written by somebody who knows how."""
        file = self._partial / name
        write(file)
        sync_path(file)
        self._files[name] = describe_file(self._partial, name)

    def finish(self, name: str, incident: Mapping[str, Any]) -> Path:
        """Write incident.json and make it all one folder of this name; an older one is replaced."""
        text = encode_document({**incident, "files": self._files})
        write_file(self._partial / DOCUMENT, [text.encode()])
        target = self._folder / name
        finish_folder(self._partial, target, below=self._run_dir)
        return target

    def discard(self) -> None:
        """It was no incident after all."""
        with suppress(OSError):
            remove_tree(self._partial, below=self._run_dir)
        remove_if_empty(self._folder, below=self._run_dir)


def remove_unfinished(run_dir: Path, rank: int) -> None:
    """What a killed process of this rank was writing when it ended."""
    # A folder behind a link is not ours to tidy: writing an incident into it will be refused.
    with suppress(OSError, RunError):
        for name in names_in(run_dir, rundir.INCIDENTS):
            if name.endswith(f"-rank{rank}.partial"):
                remove_tree(run_dir / rundir.INCIDENTS / name, below=run_dir)
