"""The text of a run's samples, for the commands that show samples. No torch."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gradsight.errors import GradsightError
from gradsight.store.reader import open_run

if TYPE_CHECKING:
    from gradsight.train.samples import Samples


class Texts:
    """Looks a sample's text up by its id; the data is opened when the first one is asked for."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.why_not: str | None = None
        """Why there is no text."""

    def __call__(self, sample_id: str) -> str | None:
        if self.samples is None or not sample_id.isdecimal() or int(sample_id) >= len(self.samples):
            return None
        text: str = self.samples.text(int(sample_id))
        return text

    @cached_property
    def samples(self) -> "Samples | None":
        """What a run of `gradsight train` read; None where that cannot be had."""
        try:
            settings = (
                open_run(self._run_dir).config.get("settings", {})
                if (self._run_dir / "run.sqlite").is_file()
                else {}
            )
            if "train" in settings:
                from gradsight.train.samples import open_samples

                return open_samples(settings)
            self.why_not = (
                "No text of samples here: only runs of `gradsight train` say what they read."
            )
        except (GradsightError, OSError) as error:
            self.why_not = f"The samples' text cannot be shown: {error}"
        return None
