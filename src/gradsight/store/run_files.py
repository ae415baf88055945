"""The files of a run that people read: config.json, the report. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsight.core import rundir
from gradsight.core.documents import document_text, read_document
from gradsight.core.files import write_text
from gradsight.errors import WrongPlace


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """What config.json says; empty where there is none."""
    if not (run_dir / rundir.CONFIG).exists():
        return {}
    return read_document(run_dir, rundir.CONFIG)


def write_config(run_dir: Path, config: Mapping[str, object]) -> None:
    """Write config.json, whole or not at all."""
    write_text(run_dir / rundir.CONFIG, document_text(config), below=run_dir)


def write_run_report(run_dir: Path, text: str, page: str, picture: str | None) -> None:
    """Write report.md, report.html and, where there is something to draw, the picture of norms."""
    write_report(run_dir / rundir.REPORT, text)
    write_report(run_dir / rundir.PAGE, page)
    drawn = run_dir / rundir.NORMS
    if picture is None:
        # An earlier report's picture would be taken for this one's.
        drawn.unlink(missing_ok=True)
    else:
        write_report(drawn, picture)


def write_report(file: Path, text: str) -> None:
    """Write a text that somebody asked for, whole or not at all."""
    try:
        write_text(file, text, below=file.parent)
    except OSError as error:
        raise WrongPlace(f"{file} cannot be written: {error.strerror}") from error
