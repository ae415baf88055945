"""What the passes of a step were like, told when all that is known of them has arrived.

`PassWatch` notes passes and what lay between them; whether a gradient was cleared, or what a loss
was multiplied by, may be known to the device alone by then.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gradsight.core.loss_graph import LossForm
from gradsight.measure.host_copy import HostCopy
from gradsight.values.first_step import RepeatedPass, StepPasses

Lines = tuple[str, ...]
"""The user's lines that a pass was called from, the innermost first."""
Place = tuple[Lines, tuple[int, ...]]
"""Lines, and the places within them: one line may hold two calls."""
Caller = tuple[str | None, Lines]
"""The line that called backward(), maybe one of a library, and the user's lines."""
_ROUNDING = 1e-3
_UNKNOWN = (
    "backward at {place} ran {times} times for one step, and Gradsight cannot tell whether each "
    "loss was a mean"
)
_COUNT = (
    "backward at {place} ran {times} times for one step. Each loss is a sum divided by a number, "
    "which may be correct if it is a count over the whole step"
)


@dataclass(frozen=True, slots=True)
class NotedPass:
    """One backward pass of the step under way."""

    lines: Lines
    places: tuple[int, ...]
    """Where in these lines."""
    form: LossForm
    there: HostCopy | None = None
    """The part of its loss's factor that is on a device."""
    weight: HostCopy | None = None
    """What the weights of its loss's entries add up to."""
    rows: tuple[int, ...] = ()
    calls: tuple[tuple[object, ...], ...] | None = None
    """Where the model was called for it; None: nobody looked. At the first step, somebody does."""
    keeps_graph: bool = False
    """Whether later passes may go through its graph."""
    origin: str | None = None
    """The line of the script, or of a library that it calls, where backward() was called."""

    @property
    def place(self) -> "Place":
        """The place in the script where backward() was called."""
        return self.lines, self.places

    @property
    def caller(self) -> "Caller":
        """Where it was called from."""
        return self.origin, self.lines

    @property
    def factor(self) -> float | None:
        """What its loss was multiplied by; None where that is no number to count on."""
        factor = self.form.factor * (1.0 if self.there is None else self.there.number())
        return factor if factor and math.isfinite(factor) else None

    @property
    def mean_factor(self) -> float | None:
        """Return the factor between the loss and the mean of its entries; None if it is unknown.

        A sum that is divided by the number of its entries, or by the sum of its mask, is a mean.
        """
        factor = self.factor
        if factor is None or self.form.entries < 2 or self.form.reduction is None:
            return None
        if self.form.reduction == "mean":
            return factor
        return None if self.weight is None else factor * self.weight.number()


@dataclass(frozen=True, slots=True)
class NotedGap:
    """What became of a pass's gradient before the next pass began."""

    caller: Caller
    """Of the pass that had left it."""
    was_zero: HostCopy
    """Whether it was zero from the beginning."""
    is_gone: bool | HostCopy
    is_used: bool
    """Whether an optimizer had stepped by then."""
    has_moved: bool | HostCopy
    """Whether its weight was changed, by an optimizer or by hand; asked where nobody stepped."""
    is_missed: bool = False
    """Whether an optimizer then stepped with its weight, and found no gradient."""

    def is_clearing(self) -> bool:
        """Whether somebody has cleared it."""
        return _known(self.is_gone) and not _known(self.was_zero)

    def is_throwing_away(self) -> bool:
        """Whether that was before it was used."""
        return not self.is_used and not _known(self.has_moved)


@dataclass(frozen=True, slots=True)
class PassesOnTheWay:
    """All that was noted of a step; read in the order of the steps."""

    noted: tuple[NotedPass | NotedGap, ...]
    evaluating: tuple[tuple[str, str], ...]
    scale: HostCopy | None
    """A scaler's factor that is in its losses."""
    cut_by_checkpoint: bool
    is_last: bool
    """Whether the next step is not looked at."""
    history: "PassHistory"

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return all(copy.ready() for copy in self._copies())

    def read(self) -> StepPasses:
        """What the step was made of."""
        return self.history.add(self)

    def _copies(self) -> Iterator[HostCopy]:
        if self.scale is not None:
            yield self.scale
        for each in self.noted:
            parts: Sequence[object] = ()
            if isinstance(each, NotedPass):
                parts = (each.there, each.weight)
            else:
                parts = (each.was_zero, each.is_gone, each.has_moved)
            yield from (part for part in parts if isinstance(part, HostCopy))


class PassHistory:
    """What is known of the passes of all steps so far."""

    def __init__(self, takes_as_is: bool) -> None:
        """`takes_as_is`: the optimizer's steps are as long as the gradient says."""
        self._takes_as_is = takes_as_is
        self._thrown: dict[Caller, int] = {}
        self._used: set[Caller] = set()
        self._has_outputs: dict[Place, bool] = {}
        """Whether all passes of a place, as far as calls were seen, had a call of the model."""

    def add(self, step: PassesOnTheWay) -> StepPasses:
        """What one more step was made of."""
        passes: list[NotedPass] = []
        for each in step.noted:
            if isinstance(each, NotedPass):
                passes.append(each)
            elif each.is_clearing():
                # What was cleared is no part of the step under way.
                passes.clear()
                if each.is_throwing_away():
                    self._thrown[each.caller] = self._thrown.get(each.caller, 0) + 1
                if each.is_missed:
                    self._used.add(each.caller)  # meant to be: a pass to warm up is not
        self._used.update(each.caller for each in passes)
        scale = 1.0 if step.scale is None else step.scale.number()
        for each in passes:
            if each.calls is not None:
                was = self._has_outputs.get(each.place, True)
                self._has_outputs[each.place] = was and bool(each.calls)
        repeated, why_not_repeated = None, None
        if len(passes) > 1:
            repeated, why_not_repeated = _repeated(passes, self._has_outputs, scale)
        made = StepPasses(
            count=len(passes),
            evaluating=step.evaluating,
            repeated=repeated,
            why_not_repeated=why_not_repeated,
            summed=_summed(passes, scale) if self._takes_as_is else None,
            thrown_away=self._thrown_away(),
            cut_by_checkpoint=step.cut_by_checkpoint,
        )
        if step.is_last:
            self._thrown.clear()
        return made

    def _thrown_away(self) -> tuple[int, str | None] | None:
        thrown = {caller: n for caller, n in self._thrown.items() if caller in self._used}
        if not thrown:
            return None
        caller = max(thrown, key=lambda each: thrown[each])
        return thrown[caller], _first(caller[1])


def _repeated(
    passes: Sequence[NotedPass], has_outputs: Mapping[Place, bool], scale: float
) -> tuple[RepeatedPass | None, str | None]:
    """The line that ran backward most often, each time with a mean of a batch of its own.

    Also return why that cannot be told, or None. `has_outputs`: places whose passes, as far as
    calls were seen, had outputs of their own.
    """
    alike = max(_alike(passes), key=len, default=[])
    if len(alike) < 2 or not alike[0].lines:
        return None, None
    first = alike[0]
    # Several terms of one output are no micro-batches.
    if any(each.rows != first.rows or not has_outputs.get(each.place) for each in alike):
        return None, None
    if any(each.calls is None and before.keeps_graph for before, each in pairwise(alike)):
        return None, None
    factors = [each.mean_factor for each in alike]
    factor = factors[0]
    place = _first(first.lines)
    if any(each is None for each in factors):
        is_plain = all(each.form.reduction == "sum" and each.factor == scale for each in alike)
        return None, None if is_plain else _UNKNOWN.format(place=place, times=len(alike))
    if any(not math.isclose(each or 0.0, factor or 0.0, rel_tol=_ROUNDING) for each in factors):
        is_mean = all(each.form.reduction == "mean" for each in alike)
        return None, None if is_mean else _COUNT.format(place=place, times=len(alike))
    return RepeatedPass(len(alike), (factor or 0.0) / scale, place), None


def _alike(passes: Sequence[NotedPass]) -> Iterable[list[NotedPass]]:
    """Group passes by the line of backward(), or by the line that called the model.

    A loop may call backward() in two branches, for example one inside no_sync().
    """
    groups: dict[object, list[NotedPass]] = {}
    called: dict[object, object] = {}
    for each in passes:
        key: object = each.place
        if each.calls:
            outer = (each.lines[1:], each.places[1:])
            key = called.setdefault((each.calls, outer, each.form.operation, each.rows), key)
        groups.setdefault(key, []).append(each)
    return groups.values()


def _summed(passes: Sequence[NotedPass], scale: float) -> int | None:
    """The fewest entries that a loss of the step is a plain sum over; None where one is not."""
    if not passes or any(each.form.reduction != "sum" for each in passes):
        return None
    factors = [each.factor for each in passes]
    if any(factor is None or abs(factor / scale - 1) > 1e-6 for factor in factors):
        return None
    return min(each.form.entries for each in passes)


def _known(flag: bool | HostCopy) -> bool:
    return bool(flag.number()) if isinstance(flag, HostCopy) else flag


def _first(lines: Sequence[str]) -> str | None:
    return lines[0] if lines else None
