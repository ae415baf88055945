"""The files of a run that people read: config.json, report.md, norms.svg. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsight.core import rundir
from gradsight.core.files import write_text
from gradsight.errors import RunError, WrongPlace


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """What config.json says; empty where there is none."""
    file = run_dir / rundir.CONFIG
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise RunError(f"{file} should hold a JSON object, but holds a {type(config).__name__}")
    return config


def write_config(run_dir: Path, config: Mapping[str, object]) -> None:
    """Write config.json, whole or not at all."""
    write_text(run_dir / rundir.CONFIG, json.dumps(config, indent=1))


def write_run_report(run_dir: Path, text: str, picture: str | None) -> None:
    """Write report.md and, where there is something to draw, the picture of norms beside it."""
    write_report(run_dir / rundir.REPORT, text)
    drawn = run_dir / rundir.NORMS
    if picture is None:
        # An earlier report's picture would be taken for this one's.
        drawn.unlink(missing_ok=True)
    else:
        write_report(drawn, picture)


def write_report(file: Path, text: str) -> None:
    """Write a text that somebody asked for, whole or not at all."""
    try:
        write_text(file, text)
    except OSError as error:
        raise WrongPlace(f"{file} cannot be written: {error.strerror}") from error
