"""Texts of a few samples of a run, by their ids: kept where a trainer's data is not ours to open.

Only written where the user has asked for scores or for the data of incidents. No torch.
"""

from collections.abc import Mapping
from pathlib import Path

from gradsight.core import rundir
from gradsight.core.documents import document_text, read_document
from gradsight.core.files import write_text
from gradsight.errors import GradsightError

_LONGEST = 400
"""Signs of a text that are kept: it is shown in a line of a table."""
_MOST = 1000
"""Texts of a run; those of earlier trainings go first."""


def write_sample_texts(run_dir: Path, texts: Mapping[str, str]) -> None:
    """Keep these texts beside those that the run has already."""
    known = read_sample_texts(run_dir)
    for sample_id, text in texts.items():
        known.pop(sample_id, None)
        known[sample_id] = text[:_LONGEST]
    newest = dict(list(known.items())[-_MOST:])
    write_text(run_dir / rundir.SAMPLE_TEXTS, document_text({"texts": newest}))


def read_sample_texts(run_dir: Path) -> dict[str, str]:
    """The texts that a run keeps, by the ids of their samples; empty where they cannot be read."""
    if not (run_dir / rundir.SAMPLE_TEXTS).exists():
        return {}
    try:
        texts = read_document(run_dir, rundir.SAMPLE_TEXTS).get("texts")
    except GradsightError:
        return {}
    if not isinstance(texts, dict):
        return {}
    return {key: text for key, text in texts.items() if isinstance(text, str)}
