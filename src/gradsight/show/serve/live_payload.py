"""What the page of a followed run is told: everything once, then what is new. No torch.

The picture comes in columns of a power of two of steps. Whoever shows it says which columns it has,
and gets those that have changed since: the last one, and what came after it. Everything else comes
in parts, each of which is sent again when it has changed.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gradsight.errors import GradsightError, RunError
from gradsight.show.page.encode import encoded_level
from gradsight.show.page.heat import DETAIL_MAPS, MOST_COLUMNS
from gradsight.show.page.histograms import histograms_over_time, looks_at, zero_shares
from gradsight.show.page.payload import SCHEMA, WholeRun, row_list, run_words
from gradsight.show.page.pyramid import Columns, grid_factor
from gradsight.show.page.sections import expert_section
from gradsight.show.page.series import clipping, skipped_steps
from gradsight.show.run_statistics import RunStatistics
from gradsight.show.serve.live_run import LiveRun
from gradsight.show.serve.picture import Picture
from gradsight.show.summary import summary_of
from gradsight.values.dumps import DumpMetadata

_MOST_CELLS = 5_000_000
_PARTS_EVERY = 1.0
_SHARE = 0.05
"""Of the time that goes into reading parts again: the training beside it wants the machine."""


class DumpsOf(Protocol):
    """Finds the dumps that lie beside a record."""

    def __call__(self, run_dir: Path, /) -> Sequence[DumpMetadata]: ...


@dataclass(frozen=True)
class Shown:
    """What a page shows already."""

    generation: int
    """Of the run as it was then; where it was started again, nothing holds any more."""
    factor: int
    """Steps of a column."""
    after: int
    """The first step of its last column."""
    parts: int
    """The number of the newest part that it has."""


class LivePayload:
    """The payload of one run, kept up to date."""

    def __init__(self, live: LiveRun, dumps_of: DumpsOf) -> None:
        self._live = live
        self._dumps_of = dumps_of
        self._parts: dict[str, Any] = {}
        self._numbers: dict[str, int] = {}
        """When each part changed last."""
        self._newest = 0
        self._next_reading = 0.0
        self._found: list[tuple[str, int, int]] | None = None

    def whole(self) -> dict[str, Any]:
        """Everything, as a report has it."""
        with self._live.lock:
            self._refresh_parts()
            parts = dict(self._parts)
            picture = self._live.picture
            heat: dict[str, Any] = {"rows": [], "maps": {**parts.pop("maps"), "norm": []}}
            if picture is not None and len(picture):
                factor = grid_factor(len(picture), _most_columns(picture))
                heat["rows"] = row_list(picture.rows)
                heat["maps"]["norm"] = [_level(picture, 0, len(picture), factor)]
            lines = {**self._live.lines.thinned(), **parts.pop("marks")}
            return {
                "schema": SCHEMA,
                **parts,
                **self._position(),
                "heat": heat,
                "lines": lines,
            }

    def update(self, shown: Shown) -> tuple[dict[str, Any], Shown]:
        """What a page that shows this must be told, and what it shows then."""
        with self._live.lock:
            with contextlib.suppress(GradsightError):
                self._refresh_parts()
            picture = self._live.picture
            message = self._position()
            if picture is None or not len(picture):
                return message, shown
            too_many = 2 * _most_columns(picture) * shown.factor
            if shown.generation != self._live.generation or len(picture) > too_many:
                return {**message, "reload": True}, shown
            first, last = picture.places(shown.after, picture.last_step)
            tail = picture.columns(first, last, shown.factor)
            message["tail"] = _encoded(tail, shown.factor)
            message["lines"] = self._live.lines.thinned()
            message["parts"] = {
                name: self._parts[name]
                for name, number in self._numbers.items()
                if number > shown.parts
            }
            return message, replace(shown, after=int(tail.starts[-1]), parts=self._newest)

    def window(self, first: int, last: int, factor: int) -> dict[str, Any] | None:
        """The steps from `first` to `last`, included, in columns of so many or more."""
        with self._live.lock:
            picture = self._live.picture
            if picture is None or not len(picture):
                return None
            places = picture.places(first, last)
            least = grid_factor(places[1] - places[0], _MOST_CELLS // max(1, len(picture.rows)))
            return _level(picture, *places, max(factor, least))

    def _position(self) -> dict[str, Any]:
        """How far the run has come."""
        live = self._live
        steps = {"count": len(live.steps), "first": None, "last": None}
        if live.steps:
            steps["first"] = live.steps[0].step
            steps["last"] = live.steps[-1].step
        known = {
            "generation": live.generation,
            "parts": self._newest,
            "trouble": live.trouble,
        }
        return {"steps": steps, "live": known}

    def _refresh_parts(self) -> None:
        """Read what is said of the run again, where that is due or there is a new finding."""
        run = self._live.run
        if run is None:
            # It is gone or damaged, which the page is told; what was known of it stays.
            if not self._parts:
                raise RunError(self._live.trouble or "the run cannot be read")
            return
        began = time.monotonic()
        found = [(each.code, each.first_step, len(each.parameters)) for each in run.findings()]
        if found == self._found and began < self._next_reading:
            return
        self._take_parts(self._read_parts(run))
        self._found = found
        now = time.monotonic()
        self._next_reading = now + max(_PARTS_EVERY, (now - began) / _SHARE)

    def _take_parts(self, parts: dict[str, Any]) -> None:
        changed = [name for name in parts if parts[name] != self._parts.get(name, ...)]
        if changed:
            self._newest += 1
            self._numbers |= dict.fromkeys(changed, self._newest)
        self._parts = parts

    def _read_parts(self, run: WholeRun) -> dict[str, Any]:
        live = self._live
        statistics = RunStatistics()
        statistics.broken = dict(live.broken)
        summary = summary_of(run, live.steps, statistics, self._dumps_of(live.path))
        parts = run_words(run, summary)
        del parts["steps"]  # they are told with every message
        parts["marks"] = {"skipped": skipped_steps(live.steps), "clipping": clipping(live.steps)}
        parts["maps"] = {}
        parts["histograms"] = None
        parts["experts"] = expert_section(summary.experts)
        if live.picture is not None:
            looks = looks_at(run)
            parts["histograms"] = histograms_over_time(looks, live.picture.rows)
            zeros = zero_shares(looks, live.picture.rows)
            found = {name: live.picture.details(name) for name in DETAIL_MAPS}
            found["zeros"] = zeros
            for name, columns in found.items():
                if columns is not None:
                    parts["maps"][name] = [encoded_level(columns, fine=True)]
        return parts


def _most_columns(picture: Picture) -> int:
    """Columns of the whole run: about a screen's, fewer where there are many rows."""
    return max(128, min(MOST_COLUMNS, _MOST_CELLS // max(1, len(picture.rows))))


def _level(picture: Picture, first: int, last: int, factor: int) -> dict[str, Any]:
    return _encoded(picture.columns(first, last, factor), factor)


def _encoded(columns: Columns, factor: int) -> dict[str, Any]:
    return {**encoded_level(columns, fine=True), "factor": factor}
