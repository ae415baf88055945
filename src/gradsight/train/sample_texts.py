"""The text of a run's samples, for whoever shows samples. No torch."""

from functools import cached_property
from pathlib import Path
from typing import Any

from gradsight.core import rundir
from gradsight.errors import GradsightError
from gradsight.store.reader import open_run
from gradsight.train.samples import Samples, open_samples


class SampleTexts:
    """Looks a sample's text up by its id; the data is opened when the first one is asked for."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.why_not: str | None = None
        """Why there is no text."""

    def __call__(self, sample_id: str) -> str | None:
        if self.samples is None or not sample_id.isdecimal() or int(sample_id) >= len(self.samples):
            return None
        return self.samples.text(int(sample_id))

    @cached_property
    def samples(self) -> Samples | None:
        """What a run of `gradsight train` read; None where that cannot be had."""
        try:
            settings = self._settings()
            if "train" in settings:
                return open_samples(settings)
            self.why_not = (
                "No text of samples here: only runs of `gradsight train` say what they read."
            )
        except (GradsightError, OSError) as error:
            self.why_not = f"The samples' text cannot be shown: {error}"
        return None

    def _settings(self) -> dict[str, Any]:
        # A GhostEngine with a run_dir but no watch leaves scores and no record.
        if not rundir.is_run(self._run_dir):
            return {}
        settings: dict[str, Any] = open_run(self._run_dir).config.get("settings", {})
        return settings
