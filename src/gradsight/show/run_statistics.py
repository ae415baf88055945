"""Statistics of a whole run, added up in one pass over its arrays. No torch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradsight.store.stat_chunks import NO_GRADIENT, StatChunk
from gradsight.values.health_report import ParameterCounts
from gradsight.values.steps import block_of


@dataclass(frozen=True)
class BlockNorms:
    """The gradient of one block over the steps."""

    norms: npt.NDArray[np.float64]
    """At every step at which a parameter of it has a gradient."""
    largest: float
    """The largest magnitude of any entry at any step, of those that are finite."""
    ratios: list[float]
    """Every update-to-weight ratio of its parameters."""
    weights: list[float]
    """At every closer look, the median root mean square of its parameters' weights."""


class RunStatistics:
    """What a report says of the statistics of parameters; takes chunk after chunk."""

    def __init__(self) -> None:
        self.broken: dict[int, list[str]] = {}
        """Steps whose gradient is not finite, with the parameters concerned."""
        self.received: set[str] = set()
        """Parameters that have had a gradient at any step."""
        self._norms: dict[str, list[npt.NDArray[np.float64]]] = {}
        self._largest: dict[str, float] = {}
        self._ratios: dict[str, list[float]] = {}
        self._weights: dict[str, list[float]] = {}
        self._last = ParameterCounts(0, 0, 0, 0)

    def add(self, chunk: StatChunk) -> None:
        """The next steps."""
        blocks: dict[str, list[int]] = {}
        for place, name in enumerate(chunk.names):
            blocks.setdefault(block_of(name), []).append(place)
        for block, places in blocks.items():
            self._add_block(chunk, block, places)
        received = (chunk.l2 != NO_GRADIENT).any(axis=0)
        self.received |= {chunk.names[place] for place in np.flatnonzero(received)}
        broken = chunk.broken()
        for place in np.flatnonzero(broken.any(axis=1)).tolist():
            names = [chunk.names[column] for column in np.flatnonzero(broken[place])]
            self.broken[int(chunk.steps[place])] = names
        self._last = _counts(chunk)

    def _add_block(self, chunk: StatChunk, block: str, places: list[int]) -> None:
        where: slice | list[int] = places
        if places == list(range(places[0], places[-1] + 1)):
            where = slice(places[0], places[-1] + 1)  # as nearly always: no copy is needed
        l2 = chunk.l2[:, where].astype(np.float64)
        has_gradient = l2 != NO_GRADIENT
        # hypot's way: a square may be too large for any number where the norm itself is not.
        peak = np.where(has_gradient, l2, 0.0).max(axis=1, initial=0.0)
        unit = np.where((peak > 0) & np.isfinite(peak), peak, 1.0)
        with np.errstate(invalid="ignore", over="ignore"):
            squares = np.where(has_gradient, (l2 / unit[:, None]) ** 2, 0.0).sum(axis=1)
        norms = np.where(np.isfinite(peak), unit * np.sqrt(squares), peak)
        self._norms.setdefault(block, []).append(norms[has_gradient.any(axis=1)])
        largest = chunk.columns["max_abs"][:, where]
        finite = largest[np.isfinite(largest)]
        before = self._largest.get(block, 0.0)
        self._largest[block] = max(before, float(finite.max(initial=0.0)))
        if "update_ratio" in chunk.columns:
            ratios = chunk.columns["update_ratio"][:, where]
            self._ratios.setdefault(block, []).extend(ratios[~np.isnan(ratios)].tolist())
        if "weight_rms" in chunk.columns:
            weights = chunk.columns["weight_rms"][:, where]
            looks = weights[~np.isnan(weights).all(axis=1)]
            self._weights.setdefault(block, []).extend(np.nanmedian(looks, axis=1).tolist())

    def blocks(self) -> dict[str, BlockNorms]:
        """Every block that has had a gradient, in the model's order."""
        result = {}
        for block, parts in self._norms.items():
            norms = np.concatenate(parts)
            if len(norms):
                result[block] = BlockNorms(
                    norms=norms,
                    largest=self._largest[block],
                    ratios=self._ratios.get(block, []),
                    weights=self._weights.get(block, []),
                )
        return result

    def last_counts(self) -> ParameterCounts:
        """How many parameters had a gradient at the last step, and of what kind."""
        return self._last


def _counts(chunk: StatChunk) -> ParameterCounts:
    """Of the last step of a chunk."""
    norms = chunk.l2[-1]
    has_gradient = norms != NO_GRADIENT
    bad = {}
    for name in ("nan", "inf"):
        column = chunk.columns.get(name)
        bad[name] = 0 if column is None else int((column[-1] != 0)[has_gradient].sum())
    return ParameterCounts(
        nan=bad["nan"],
        inf=bad["inf"],
        zero=int((norms == 0).sum()),
        parameters=int(has_gradient.sum()),
    )
