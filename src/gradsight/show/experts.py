"""Experts of a mixture over the run, as the report and the page tell of them. No torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gradsight.show.figures import figure, sparkline
from gradsight.values.texts import in_code

_MOST_LOOKS = 160
_MOST_GROUPS = 400
_MOST_ROWS = 40
_PER_OCTAVE = 16
_EVEN = 128
_NOT_FINITE = 255


class RunWithExperts(Protocol):
    """What is read of a run."""

    def expert_looks(self) -> Iterable[tuple[int, str, list[float]]]: ...


@dataclass(frozen=True)
class ExpertNorms:
    """The experts of one group at the steps that were looked at, thinned where they are many."""

    steps: list[int]
    norms: list[list[float]]
    """At each of these steps, the norm of every expert."""

    @property
    def size(self) -> int:
        """How many experts there are."""
        return len(self.norms[0])

    def shares(self) -> npt.NDArray[np.float64]:
        """Each norm over the root mean square of all at its step, [looks, experts]: 1 is even."""
        norms = np.array(self.norms)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            largest = norms.max(axis=1, keepdims=True)
            scaled = norms / largest
            shares: npt.NDArray[np.float64] = scaled / np.sqrt((scaled**2).mean(1, keepdims=True))
        return shares

    def codes(self) -> npt.NDArray[np.uint8]:
        """A byte for every expert at each look.

        0 has no gradient; 128 has an even share, and 16 more are twice that; 255 is not finite.
        """
        shares = self.shares()
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = np.clip(np.round(_EVEN + _PER_OCTAVE * np.log2(shares)), 1, 254)
        codes = np.where(np.isfinite(shares), codes, _NOT_FINITE)
        return np.where(np.array(self.norms) == 0, 0, codes).astype(np.uint8)

    def without_gradient(self) -> list[int]:
        """At each look: how many experts had none."""
        return [sum(norm == 0 for norm in norms) for norms in self.norms]


def experts_of(run: RunWithExperts) -> dict[str, ExpertNorms]:
    """By group, in the order in which they were recorded; empty without any experts."""
    found: dict[str, _Gathered] = {}
    for step, group, norms in run.expert_looks():
        if norms and (group in found or len(found) < _MOST_GROUPS):
            found.setdefault(group, _Gathered()).add(step, norms)
    return {name: ExpertNorms(each.steps, each.norms) for name, each in found.items()}


class _Gathered:
    """Looks at one group, of which every second is dropped whenever there are too many."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.norms: list[list[float]] = []
        self._every = 1
        self._seen = 0

    def add(self, step: int, norms: list[float]) -> None:
        """The next look."""
        # A run that was started again may have another model.
        if self.norms and len(self.norms[0]) != len(norms):
            self.steps.clear()
            self.norms.clear()
        if self._seen % self._every == 0:
            self.steps.append(step)
            self.norms.append(norms)
        self._seen += 1
        if len(self.steps) > _MOST_LOOKS:
            self.steps = self.steps[::2]
            self.norms = self.norms[::2]
            self._every *= 2


def expert_table(experts: Mapping[str, ExpertNorms]) -> list[str]:
    """The section of report.md."""
    if not experts:
        return []
    lines = [
        "## Experts",
        "",
        "Norm of each expert's gradient at the last measured step; 1 is an even share.",
        "",
        "| experts of | how many | without a gradient | least | largest | without, over time |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, group in list(experts.items())[:_MOST_ROWS]:
        without = group.without_gradient()
        last = group.shares()[-1]
        cells = [f"`{in_code(name)}`", str(group.size), str(without[-1])]
        cells += [figure(float(last.min())), figure(float(last.max()))]
        lines.append(f"| {' | '.join(cells)} | `{sparkline([float(each) for each in without])}` |")
    if len(experts) > _MOST_ROWS:
        lines.append(f"\n{len(experts) - _MOST_ROWS} more are in the record.")
    return lines
