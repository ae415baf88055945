"""Makes a record smaller: old steps are put together by their minimum and maximum. No torch.

Eight neighbours become two: at the first step of theirs the lowest of everything that was recorded,
at the last step the highest, and `gradient` says so. A spike and a dip of one step both survive, as
numbers; at which of the steps they were is lost. The finest are put together first, and among them
the oldest: the older, the coarser. What is near a finding, and the newest quarter, stays as it is.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsight.store import tail_format as frames
from gradsight.store.schema import has_table
from gradsight.store.stat_chunks import NO_GRADIENT, StatChunk, stat_chunks
from gradsight.values.steps import THINNED, THINNED_HIGH, THINNED_LOW, TRUE_GRADIENT

TOGETHER = 8
NEAR = 64
"""Steps on both sides of a finding that are kept."""
_ROUNDS = 12
"""Each makes what is old up to four times smaller."""
_NUMBERS = ("loss", "lr", "total_norm", "clip_coef", "scale")

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Span:
    """One step, or several that have been put together: two rows."""

    first: int
    last: int
    bytes: int
    layout: int | None

    @property
    def fineness(self) -> int:
        """Spans of about the same length have the same."""
        return (self.last - self.first + 1).bit_length()


def thin(connection: sqlite3.Connection, most: int) -> bool:
    """Put old steps together until a record takes no more than so many bytes, or nothing is left.

    True where anything was.
    """
    excess = used_bytes(connection) - most
    changed = False
    for _ in range(_ROUNDS):
        if excess <= 0:
            break
        shed = _one_round(connection, excess)
        if shed == 0:
            break
        changed = True
        excess -= shed
    if changed:
        connection.commit()
        # Deleted rows leave holes in the file, which the disk would keep.
        connection.execute("VACUUM")
    return changed


def used_bytes(connection: sqlite3.Connection) -> int:
    """The bytes of a record that hold something."""
    numbers = {}
    for name in ("page_count", "freelist_count", "page_size"):
        numbers[name] = connection.execute(f"PRAGMA {name}").fetchone()[0]
    pages: int = numbers["page_count"] - numbers["freelist_count"]
    return pages * int(numbers["page_size"])


def _one_round(connection: sqlite3.Connection, excess: int) -> int:
    """Put the finest together, the oldest first, until so many bytes are saved; how many were."""
    layouts = dict(connection.execute("SELECT layout, names FROM layouts"))
    names = {number: frames.load_names(text) for number, text in layouts.items()}
    shed = 0
    for group in sorted(_groups(connection), key=lambda each: (each[0].fineness, each[0].first)):
        if shed >= excess:
            break
        before = sum(span.bytes for span in group)
        _put_together(connection, group, names)
        largest = max(span.bytes for span in group)
        shed += max(1, before - 2 * largest)
    return shed


def _groups(connection: sqlite3.Connection) -> Iterator[list[_Span]]:
    """Neighbours that may be put together."""
    spans = list(_spans(connection))
    kept = _kept(connection)
    open_to = [span for span in spans[: len(spans) * 3 // 4] if not _is_near(span, kept)]
    place = {span.first: position for position, span in enumerate(spans)}
    # Of one resolution and one list of parameters, with nothing in between that stays.
    alike = groupby(
        enumerate(open_to),
        key=lambda each: (each[1].fineness, each[1].layout, place[each[1].first] - each[0]),
    )
    for _, run in alike:
        neighbours = [span for _, span in run]
        for start in range(0, len(neighbours) - TOGETHER + 1, TOGETHER):
            yield neighbours[start : start + TOGETHER]


def _spans(connection: sqlite3.Connection) -> Iterator[_Span]:
    """What the record holds, in the order of steps."""
    query = (
        "SELECT steps.step, gradient, layout, coalesce(length(packed), 0) FROM steps "
        "LEFT JOIN stats ON stats.step = steps.step WHERE time IS NOT NULL ORDER BY steps.step"
    )
    low: tuple[int, int] | None = None
    for step, gradient, layout, size in connection.execute(query):
        bytes_of_row = size + 100
        if str(gradient).startswith(THINNED_LOW):
            low = (step, bytes_of_row)
        elif low is not None and str(gradient).startswith(THINNED_HIGH):
            yield _Span(low[0], step, low[1] + bytes_of_row, layout)
            low = None
        else:
            yield _Span(step, step, bytes_of_row, layout)
            low = None


def _kept(connection: sqlite3.Connection) -> Numbers:
    """The steps of findings, in order."""
    rows = connection.execute("SELECT step FROM records WHERE kind = 'finding' ORDER BY step")
    return np.array([step for (step,) in rows], dtype=np.float64)


def _is_near(span: _Span, kept: Numbers) -> bool:
    at = int(np.searchsorted(kept, span.first - NEAR))
    return at < len(kept) and bool(kept[at] <= span.last + NEAR)


def _put_together(
    connection: sqlite3.Connection, group: Sequence[_Span], names: dict[int, list[str]]
) -> None:
    """Two rows of everything in the place of a group's."""
    first = group[0].first
    last = group[-1].last
    between = (first, last)
    layout = group[0].layout
    if layout is not None:
        query = "SELECT step, packed FROM stats WHERE step BETWEEN ? AND ? ORDER BY step"
        rows = [
            (step, names[layout], packed) for step, packed in connection.execute(query, between)
        ]
        (chunk,) = stat_chunks(rows, size=len(rows))
        low, high = extremes(chunk)
        connection.execute("DELETE FROM stats WHERE step BETWEEN ? AND ?", between)
        added = [(first, layout, low), (last, layout, high)]
        connection.executemany("INSERT INTO stats VALUES (?, ?, ?)", added)
    _steps_together(connection, first, last)
    _scalars_together(connection, first, last)
    # Counts of powers of two have no minimum: one look of each group stays.
    connection.execute(
        "DELETE FROM histograms WHERE source = '' AND step BETWEEN ? AND ? AND step > "
        "(SELECT min(step) FROM histograms WHERE source = '' AND step BETWEEN ? AND ?)",
        (*between, *between),
    )
    if has_table(connection, "experts"):
        connection.execute(
            "DELETE FROM experts WHERE step BETWEEN ? AND ? AND step > "
            "(SELECT min(step) FROM experts WHERE step BETWEEN ? AND ?)",
            (*between, *between),
        )


def extremes(chunk: StatChunk) -> tuple[bytes, bytes]:
    """The lowest and the highest of every number of every parameter, packed.

    A NaN makes the highest NaN; the lowest is of what is finite, where anything is.
    """
    has_gradient = chunk.l2 != NO_GRADIENT
    rows = np.flatnonzero(has_gradient.any(axis=0))
    low = {}
    high = {}
    for name, values in chunk.columns.items():
        part = np.where(has_gradient, values, np.nan)[:, rows].astype(np.float64)
        if name in frames.OPTIONAL:
            if not np.isnan(part).all():
                low[name] = np.fmin.reduce(part)
                high[name] = np.fmax.reduce(part)
        elif name in frames.COUNTS:
            counts = np.where(np.isnan(part), 0.0, part)
            low[name] = counts.min(axis=0)
            # -1: there are some, but they were not counted.
            high[name] = np.where((counts < 0).any(axis=0), -1.0, counts.max(axis=0))
        else:
            low[name], high[name] = _finite_extremes(part, has_gradient[:, rows])
    some = None if len(rows) == len(chunk.names) else rows.tolist()
    wide = chunk.l2.dtype == np.float64
    return frames.pack_statistics(some, low, wide), frames.pack_statistics(some, high, wide)


def _finite_extremes(values: Numbers, there: npt.NDArray[np.bool_]) -> tuple[Numbers, Numbers]:
    high = np.where(there, values, -np.inf).max(axis=0)  # NaN wins
    finite = np.where(np.isfinite(values), values, np.inf).min(axis=0)
    return np.where(np.isinf(finite), high, finite), high


def _steps_together(connection: sqlite3.Connection, first: int, last: int) -> None:
    columns = f"time, {', '.join(_NUMBERS)}, skipped, gradient"
    query = f"SELECT {columns} FROM steps WHERE step BETWEEN ? AND ? ORDER BY step"
    rows = connection.execute(query, (first, last)).fetchall()
    made = [row for row in rows if row[0] is not None]
    low: list[Any] = [first, made[0][0]]
    high: list[Any] = [last, made[-1][0]]
    for place in range(1, 1 + len(_NUMBERS)):
        lowest, highest = _ends(row[place] for row in made)
        low.append(lowest)
        high.append(highest)
    kinds = {kind for row in made for kind in _kinds(str(row[-1]))} - {TRUE_GRADIENT}
    more = "".join(f"; {kind}" for kind in sorted(kinds))
    low += [0, THINNED_LOW + more]
    high += [int(any(row[-2] for row in made)), THINNED_HIGH + more]
    connection.execute("DELETE FROM steps WHERE step BETWEEN ? AND ?", (first, last))
    marks = ", ".join("?" * len(low))
    connection.executemany(f"INSERT INTO steps VALUES ({marks})", [low, high])


def _kinds(gradient: str) -> list[str]:
    """The labels of the steps that a row stands for, without those of thinning."""
    if gradient.startswith(THINNED):
        return gradient.split("; ")[1:]
    return [gradient]


def _scalars_together(connection: sqlite3.Connection, first: int, last: int) -> None:
    query = "SELECT name, value FROM scalars WHERE step BETWEEN ? AND ? ORDER BY name"
    rows = connection.execute(query, (first, last)).fetchall()
    connection.execute("DELETE FROM scalars WHERE step BETWEEN ? AND ?", (first, last))
    for name, of_name in groupby(rows, key=lambda row: row[0]):
        lowest, highest = _ends(value for _, value in of_name)
        added = [(first, name, lowest), (last, name, highest)]
        connection.executemany("INSERT INTO scalars VALUES (?, ?, ?)", added)


def _ends(values: Iterable[Any]) -> tuple[Any, Any]:
    """The lowest and the highest of what a column holds, in which a NaN is a text."""
    known = [value for value in values if value is not None]
    if not known:
        return None, None
    numbers = [value for value in known if not isinstance(value, str)]
    lowest = min(numbers, default="nan")
    highest = max(numbers, default="nan")
    return lowest, "nan" if len(numbers) < len(known) else highest
