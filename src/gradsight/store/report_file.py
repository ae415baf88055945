"""report.md and its like: text that is there whole or not at all. No torch."""

from pathlib import Path

from gradsight.core.files import write_text
from gradsight.errors import RunError


def write_report(file: Path, text: str) -> None:
    """Write a report whole or not at all."""
    try:
        write_text(file, text)
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}") from error
