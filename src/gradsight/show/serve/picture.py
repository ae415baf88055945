"""The picture of a run that grows: every step, and columns of 8, 64, 512 and more steps. No torch.

A level holds whole columns only, so that what is written never changes: a run that grows is only
ever added to, whoever looks at it. What is not a whole column yet comes from the level below.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradsight.show.page.heat import DETAIL_MAPS, detail_heights, map_columns
from gradsight.show.page.heights import HeatRows, Heights
from gradsight.show.page.pyramid import LEVEL_FACTOR, Columns, coarser, joined
from gradsight.show.page.usual import Usual, total_logarithms
from gradsight.show.serve.sheets import Sheet
from gradsight.store.stat_chunks import NO_GRADIENT, StatChunk

_LEVELS = 6
"""The coarsest has columns of 32,768 steps."""
_ALL = 2**62


class _Level:
    """Whole columns of so many steps."""

    def __init__(self, folder: Path, level: int, width: int, steps: int) -> None:
        self.factor = LEVEL_FACTOR**level
        whole = steps // self.factor
        self.high = Sheet(folder / f"high{level}", width, "<f4", whole)
        # Spreads are shown in a few dozen shades: half a number is enough for them.
        self.deviation = Sheet(folder / f"deviation{level}", width, "<f2", whole)
        # A column of one step is as low as it is high.
        self.low = self.high
        if level > 0:
            self.low = Sheet(folder / f"low{level}", width, "<f4", whole)

    @property
    def rows(self) -> int:
        """How many columns all of its sheets have."""
        return min(self.high.rows, self.low.rows, self.deviation.rows)

    def append(self, columns: Columns) -> None:
        self.high.append(columns.high)
        self.deviation.append(np.clip(columns.deviation, -60_000, 60_000))
        if self.low is not self.high:
            self.low.append(columns.low)

    def cut(self, rows: int) -> None:
        for sheet in {self.high, self.low, self.deviation}:
            sheet.cut(rows)

    def close(self) -> None:
        for sheet in {self.high, self.low, self.deviation}:
            sheet.close()


@dataclass(frozen=True)
class _Details:
    """Steps at which something was measured, and the heights of all rows then."""

    steps: Sheet
    heights: Sheet

    def cut_after(self, last: int) -> None:
        """Forget what is of later steps."""
        steps = self.steps.read(0, self.heights.rows)[:, 0]
        known = int(np.searchsorted(steps, last, side="right"))
        self.steps.cut(known)
        self.heights.cut(known)


class Picture:
    """All rows at all steps, as far as they have been read."""

    def __init__(self, folder: Path, names: Sequence[str], steps: int = 0) -> None:
        """A picture in an empty folder, or one that is known to hold so many steps."""
        self.rows = HeatRows(names)
        self._usual = Usual(len(self.rows))
        self._steps = Sheet(folder / "steps", 1, "<i8", steps)
        width = len(self.rows)
        self._levels = [_Level(folder, level, width, steps) for level in range(_LEVELS)]
        # What is measured on some steps only; there is no telling how many of them are whole.
        known = 0 if steps == 0 else _ALL
        self._details = {
            name: _Details(
                Sheet(folder / f"{name}_steps", 1, "<i8", known),
                Sheet(folder / f"{name}_heights", width, "<f4", known),
            )
            for name in DETAIL_MAPS
        }
        whole = min(self._steps.rows, self._levels[0].rows)
        # Whoever wrote it may have been stopped between two sheets.
        self._steps.cut(whole)
        for level in self._levels:
            level.cut(min(level.rows, whole // level.factor))
        for details in self._details.values():
            details.cut_after(self.last_step if len(self) else -1)

    def __len__(self) -> int:
        return self._steps.rows

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """The steps that it shows."""
        return self._steps.read(0, len(self))[:, 0].astype(np.int64)

    @property
    def last_step(self) -> int:
        """The last of them; it must have one."""
        return int(self._steps.read(len(self) - 1, len(self))[0, 0])

    def places(self, first: int, last: int) -> tuple[int, int]:
        """The positions of the steps from `first` to `last`: the first, and the one behind."""
        low, high = np.searchsorted(self.steps, [first, last + 1])
        return int(low), int(high)

    def knows(self, names: Sequence[str]) -> bool:
        """Whether there is a row for each of these parameters."""
        return set(names) <= set(self.rows.names)

    def look_back(self, chunk: StatChunk) -> None:
        """Learn what is usual from steps that it shows already."""
        self._measured(chunk)

    def extend(self, chunk: StatChunk) -> None:
        """Add the steps of a chunk, which come after all that it has."""
        heights, deviations = self._measured(chunk)
        steps = chunk.steps
        ones = np.ones(len(steps), dtype=np.int64)
        self._levels[0].append(Columns(steps, steps, ones, heights, heights, deviations))
        self._steps.append(steps[:, None])
        for name, details in self._details.items():
            for measured, found in detail_heights(chunk, self.rows, name):
                details.heights.append(found)
                details.steps.append(measured[:, None])
        for finer, level in zip(self._levels[:-1], self._levels[1:], strict=True):
            whole = finer.rows // LEVEL_FACTOR
            if whole > level.rows:
                new = self._read(finer, level.rows * LEVEL_FACTOR, whole * LEVEL_FACTOR)
                level.append(coarser(new, np.arange(0, len(new), LEVEL_FACTOR)))

    def _measured(self, chunk: StatChunk) -> tuple[Heights, Heights]:
        heights = self.rows.heights(chunk)
        norms = np.where(chunk.l2 == NO_GRADIENT, 0.0, chunk.l2).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            totals = np.sqrt((norms * norms).sum(axis=1))
        finite = np.isfinite(totals)
        return heights, self._usual.deviations(heights, total_logarithms(totals), finite)

    def columns(self, first: int, last: int, factor: int) -> Columns:
        """The positions from `first` up to `last`, in columns of so many steps.

        They begin at multiples of that power of two, also before `first`, so that a column is the
        same from wherever it is asked for.
        """
        last = min(last, len(self))
        first = max(0, min(first, last))
        at = first // factor * factor
        parts = []
        begins: list[int] = []
        for level in reversed(self._levels):
            if level.factor > factor:
                continue
            # From the coarsest that is fine enough, as far as it goes; then from the next finer.
            end = min(level.rows * level.factor, last // level.factor * level.factor)
            if level.factor == 1:
                end = last
            if end > at:
                parts.append(self._read(level, at // level.factor, end // level.factor))
                begins += range(at, end, level.factor)
                at = end
        if not parts:
            return self._read(self._levels[0], 0, 0)
        edges = np.flatnonzero(np.array(begins) % factor == 0)
        return coarser(joined(parts), edges)

    def details(self, name: str) -> Columns | None:
        """What was measured on some steps only, thinned; None where nothing was."""
        sheets = self._details[name]
        count = min(sheets.heights.rows, sheets.steps.rows)
        if count == 0:
            return None
        steps = sheets.steps.read(0, count)[:, 0].astype(np.int64)
        return map_columns(steps, sheets.heights.read(0, count).astype(np.float32))

    def _read(self, level: _Level, first: int, last: int) -> Columns:
        """Whole columns of a level by their positions."""
        steps = self._steps.read(first * level.factor, last * level.factor)[:, 0]
        return Columns(
            starts=steps[:: level.factor].astype(np.int64),
            lasts=steps[level.factor - 1 :: level.factor].astype(np.int64),
            counts=np.full(last - first, level.factor, dtype=np.int64),
            low=level.low.read(first, last).astype(np.float32),
            high=level.high.read(first, last).astype(np.float32),
            deviation=level.deviation.read(first, last).astype(np.float32),
        )

    def close(self) -> None:
        """Close its files."""
        self._steps.close()
        for details in self._details.values():
            details.steps.close()
            details.heights.close()
        for level in self._levels:
            level.close()
