"""report.md and its like: text that is there whole or not at all. No torch."""

import os
from pathlib import Path

from gradsight.errors import RunError


def write_report(file: Path, text: str) -> None:
    """Write a report whole or not at all."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}") from error
