"""The text of a run's samples, for whoever shows samples. No torch.

A run's config.json says which data it was trained on, but a stranger may have written it: a path in
it could be any file of the reader's. So text comes from the path that the reader gives, or from the
source of Python's standard library, which a run is trained on that names no data.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gradsight.core import rundir
from gradsight.errors import GradsightError
from gradsight.store.reader import open_run
from gradsight.store.sample_texts import read_sample_texts
from gradsight.train.config import Settings, from_dict
from gradsight.train.data import open_corpus
from gradsight.train.models import architecture
from gradsight.train.samples import Samples, numbering_stamp

_MOST_SAMPLES = 10_000_000
"""Samples that a run is believed to have had: their ids are listed in an export."""
_USED = ("data", "block_size", "architecture")


@dataclass(frozen=True, slots=True)
class Numbering:
    """How many samples the ids of a run number, and the line that says of which data."""

    count: int
    stamp: str


class SampleTexts:
    """Looks a sample's text up by its id; the data is opened when the first one is asked for.

    data, tokenizer: paths that the reader has given, or the run itself that is just ending.
    """

    def __init__(
        self, run_dir: Path, data: str | Path | None = None, tokenizer: str | Path | None = None
    ) -> None:
        self._run_dir = run_dir
        self._data = data
        self._tokenizer = None if tokenizer is None else str(tokenizer)
        self.why_not: str | None = None
        """Why there is no text."""

    def __call__(self, sample_id: str) -> str | None:
        kept = self._kept.get(sample_id)
        if kept is not None:
            return kept
        known = re.fullmatch("[0-9]{1,18}", sample_id)
        if known is None or self.samples is None or int(sample_id) >= len(self.samples):
            return None
        return self.samples.text(int(sample_id))

    @cached_property
    def _kept(self) -> dict[str, str]:
        """What the run itself has kept: of a trainer whose data is not ours to open."""
        return read_sample_texts(self._run_dir)

    @cached_property
    def samples(self) -> Samples | None:
        """What the run read; None where that cannot be had."""
        try:
            settings = self._settings
            if settings is None and self._data is None:
                self.why_not = (
                    "No text of samples here: only runs of `gradsight train` say what they read."
                )
                return None
            if self._data is None and settings is not None and settings.data is not None:
                self.why_not = (
                    "The samples' text is not shown: say where the data is, with --data PATH."
                )
                return None
            return self._opened(settings or Settings())
        except (GradsightError, OSError) as error:
            self.why_not = f"The samples' text cannot be shown: {error}"
        return None

    @property
    def numbering(self) -> Numbering | None:
        """What the run's ids number: of the data, or as the run itself has written it down."""
        if self.samples is not None:
            return Numbering(len(self.samples), self.samples.stamp)
        if self._settings is None:
            return None
        return _written_down(self._config.get("data"), _block_size(self._settings))

    def _opened(self, settings: Settings) -> Samples:
        data = None if self._data is None else str(self._data)
        return Samples(open_corpus(data), _block_size(settings), tokenizer=self._tokenizer)

    @cached_property
    def _settings(self) -> Settings | None:
        """What of the trainer's settings matters here; None for any other run."""
        settings = self._config.get("settings")
        train = settings.get("train") if isinstance(settings, dict) else None
        if not isinstance(train, dict):
            return None
        return from_dict({key: train[key] for key in _USED if key in train}, rundir.CONFIG)

    @cached_property
    def _config(self) -> dict[str, Any]:
        # A GhostEngine with a run_dir but no watch leaves scores and no record.
        if not rundir.is_run(self._run_dir):
            return {}
        return open_run(self._run_dir).config


def _block_size(settings: Settings) -> int:
    return settings.block_size or architecture(settings.architecture).block_size


def _written_down(data: Any, block_size: int) -> Numbering | None:
    """The numbering that config.json tells of, if it makes sense."""
    facts = data if isinstance(data, dict) else {}
    count, fingerprint = facts.get("samples"), facts.get("fingerprint")
    if not isinstance(count, int) or not 0 < count <= _MOST_SAMPLES:
        return None
    if not isinstance(fingerprint, str) or re.fullmatch("[0-9a-f]{16}", fingerprint) is None:
        return None
    return Numbering(count, numbering_stamp(fingerprint, block_size, count))
