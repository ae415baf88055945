"""Puts together what capture sees and measure says: one value per step, read when it has arrived
and merged over ranks.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsight.core.group import PendingArrays, ProcessGroup, rank
from gradsight.core.shards import are_spread, counts_here, local_part
from gradsight.errors import UsageError
from gradsight.health.window import RankLook
from gradsight.measure.clipping import ClipProbe
from gradsight.measure.histogram import HistogramLook
from gradsight.measure.host_copy import Arrival
from gradsight.measure.norms import Norms, NormsLook, look_closer, merge_ranks, summed_up
from gradsight.measure.units import UnitLife
from gradsight.measure.update import COLUMNS as UPDATE_COLUMNS
from gradsight.measure.update import UpdateLook
from gradsight.values.steps import Schedule, Step

Floats = npt.NDArray[np.float64]

_LAG = 1
"""Steps that may be on their way from the device before somebody waits for the oldest."""


@dataclass(slots=True)
class Noted:
    """What else was noticed during a step; None where it could not be seen."""

    loss: Tensor | None = None
    uncleared: bool | None = None
    alike: int | None = None
    half: bool | None = None
    fixed: bool = False
    guess: float | None = None
    ranks: Sequence[RankLook] = ()
    """What the ranks' own gradients were like, at steps before."""


@dataclass(slots=True)
class Look:
    """The gradients of some parameters at one moment."""

    rows: list[int]
    norms: NormsLook
    histograms: HistogramLook | None
    scale: Arrival | None
    """The factor of a GradScaler that was in them."""
    read: Norms | None = None

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return self.norms.ready()

    def numbers(self) -> Norms:
        """The norms; on an accelerator without what only a closer look could have told."""
        if self.read is None:
            self.read = self.norms.read()
        return self.read

    def factor(self) -> float:
        """What to divide by."""
        return 1.0 if self.scale is None else float(self.scale.read()[0])


@dataclass(slots=True)
class Used:
    """What one optimizer stepped with."""

    look: Look
    rows: list[int]
    scaled: bool
    probe: ClipProbe | None
    still_scaled: bool
    update: UpdateLook | None
    update_rows: list[int]


@dataclass(slots=True)
class Measured:
    """One step, complete. Arrays are over `rows`, those parameters that had a gradient."""

    step: Step
    rows: list[int]
    norms: Norms | None
    histogram_counters: Floats | None
    update_sums: Floats | None
    kept: bool = True
    """Whether histograms and updates go to the record; else they were measured for the judge alone.
    """
    dead_shares: dict[int, float] = field(default_factory=dict)
    """By row: the share of a weight's units that got no gradient at any of the last closer looks.
    """
    notes: Noted = field(default_factory=Noted)
    loss: float | None = None
    """What backward was called on, where that was a single number."""


@dataclass(slots=True)
class _Draft:
    """A step under way, then on its way from the device."""

    step: int
    time: float = 0.0
    gradient: str = ""
    scalars: dict[str, float | Arrival] = field(default_factory=dict)
    used: list[Used] = field(default_factory=list)
    probe: ClipProbe | None = None
    still_scaled: bool = False
    update: UpdateLook | None = None
    update_rows: list[int] = field(default_factory=list)
    lr: float | Tensor | None = None
    group_lrs: dict[str, float] = field(default_factory=dict)
    skipped: list[bool | Tensor] = field(default_factory=list)
    notes: Noted = field(default_factory=Noted)
    loss: Arrival | None = None

    def ready(self) -> bool:
        return all(used.look.ready() for used in self.used)


class Companion(Protocol):
    """One who needs the gradients themselves, at the same moments."""

    everywhere: bool
    """Whether every rank is to look at its gradients for this one, also where rank 0's are the
    same.
    """

    def look(self, step: int, scaler: torch.amp.GradScaler | None, norms: Norms | None) -> None:
        """The gradients are true now, with these norms (a scaler's factor in them) where they are
        known already.
        """

    def before_update(self, step: int, total: float, clip_coef: Callable[[], float | None]) -> None:
        """An optimizer is about to use gradients of this total norm before clipping. Told where
        that is known already.
        """

    def end_step(self, step: int, gradient: str, clip_coef: Callable[[], float | None]) -> None:
        """The step is made, and `gradient` says what its gradients were."""


class Assembler:
    """Listens to capture. Delivers every step once, in order, as soon as its numbers are there."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        stats: Schedule,
        histograms: Schedule,
        first_step: int,
        group: ProcessGroup | None,
        deliver: Callable[[Measured], None],
        on_failure: Callable[[Exception], None],
        companions: "Sequence[Companion]" = (),
    ) -> None:
        self._parameters = parameters
        self._closer: Callable[[int], bool] = lambda step: False
        self._units: UnitLife | None = None
        self._notes: Callable[[int], Noted] = lambda step: Noted()
        self._stats, self._histograms = stats, histograms
        self._deliver, self._on_failure, self._companions = deliver, on_failure, companions
        self._group = group if are_spread(parameters) else None
        self._left_out = (
            [not counts_here(parameter) for parameter in parameters] if self._group else []
        )
        self._measures = self._group is not None or rank() == 0
        self._looks_here = self._measures or any(companion.everywhere for companion in companions)
        self._looks: dict[int, Look] = {}  # by row, until its optimizer has stepped
        self._queue: deque[_Draft] = deque()
        self._in_flight: tuple[_Draft, PendingArrays, PendingArrays | None] | None = None
        self._draft = _Draft(first_step)
        self._looked = False
        self._sequence = -1

    def serve(
        self, closer: Callable[[int], bool], units: UnitLife, notes: Callable[[int], Noted]
    ) -> None:
        """Measure for a judge too: closer looks on these steps also, units, and what else was
        noticed in a step.
        """
        self._closer, self._units, self._notes = closer, units, notes

    # What capture tells.

    def look(self, rows: Sequence[int], scaler: torch.amp.GradScaler | None) -> None:
        """Measure these gradients now."""
        self._looked = True
        look = self._measure(rows, scaler)
        for companion in self._companions:
            companion.look(self.step, scaler, None if look is None else look.read)

    def _measure(self, rows: Sequence[int], scaler: torch.amp.GradScaler | None) -> Look | None:
        """A look at these gradients, if anything is due."""
        wants_histograms = self._measures and self._looks_closer()
        if not self._looks_here or not (self._stats.due(self.step) or wants_histograms):
            return None
        gradients = [self._gradient(row) for row in rows]
        look = Look(list(rows), NormsLook(gradients), None, _scale_of(scaler))
        if look.ready():
            look.read = look_closer(gradients, look.numbers())
        if wants_histograms:
            look.histograms = HistogramLook(gradients, offset=self.step)
            if self._units is not None:
                self._units.look(self.step, rows, gradients)
        for row in rows:
            self._looks[row] = look
        return look

    def before_update(self, rows: Sequence[int], scaler: torch.amp.GradScaler | None) -> None:
        """See what the optimizer is about to use, and keep what it is about to change."""
        looks = {id(look): look for row in rows if (look := self._looks.get(row)) is not None}
        if len(looks) == 1:
            look = next(iter(looks.values()))
            mine = (
                None
                if len(rows) >= len(look.rows)
                else {look.rows.index(row) for row in rows if row in look.rows}
            )
            self._draft.probe = ClipProbe(
                look.norms, mine, lambda place: self._gradient(look.rows[place])
            )
            self._draft.still_scaled = scaler is not None
            self._tell_companions(look, self._draft.probe)
        if looks and self._measures and self._looks_closer():
            self._draft.update_rows = list(rows)
            self._draft.update = UpdateLook(
                [local_part(self._parameters[row]) for row in rows], offset=self.step
            )

    def _tell_companions(self, look: Look, probe: ClipProbe) -> None:
        """Of the norm that is about to be used, where knowing it takes no waiting."""
        if self._companions and look.read is not None:
            factor = look.factor()
            still = factor if self._draft.still_scaled else 1.0
            for companion in self._companions:
                companion.before_update(
                    self.step,
                    look.read.total / factor,
                    lambda: probe.coefficient(look.norms, factor / still),
                )

    def after_update(
        self, rows: Sequence[int], optimizer: Optimizer | None, scaled: bool, skipped: bool | Tensor
    ) -> None:
        """Take what was looked at as what this optimizer stepped with."""
        draft = self._draft
        if draft.update is not None:
            draft.update.finish()
        by_look: dict[int, tuple[Look, list[int]]] = {}
        for row in rows:
            look = self._looks.pop(row, None)
            if look is not None:
                by_look.setdefault(id(look), (look, []))[1].append(row)
        for look, taken in by_look.values():
            draft.used.append(
                Used(
                    look,
                    taken,
                    scaled,
                    draft.probe,
                    draft.still_scaled,
                    draft.update,
                    draft.update_rows,
                )
            )
            draft.update = None
        draft.probe, draft.update, draft.update_rows = None, None, []
        draft.skipped.append(skipped)
        if draft.lr is None and optimizer is not None:
            draft.lr, draft.group_lrs = _learning_rates(optimizer)

    def end_step(self, gradient: str) -> None:
        """The step is made; hand on what has arrived."""
        draft, self._draft = self._draft, _Draft(self.step + 1)
        draft.time, draft.gradient = time.time(), gradient
        draft.notes = self._notes(draft.step)
        if draft.notes.loss is not None:
            draft.loss = Arrival(draft.notes.loss.reshape(1).clone())
        self._looked = False
        self._sequence = _sequence_number()
        for companion in self._companions:
            companion.end_step(draft.step, gradient, lambda: _clip_coefficient(draft.used))
        self._queue.append(draft)
        while self._queue and (len(self._queue) > _LAG or self._queue[0].ready()):
            self._read(self._queue.popleft())

    def failed(self, error: Exception) -> None:
        """Something of ours went wrong."""
        self._on_failure(error)

    # For the composer.

    @property
    def step(self) -> int:
        """The step under way."""
        return self._draft.step

    @property
    def begun(self) -> bool:
        """Whether the step under way has begun: its gradients were looked at, or autograd has
        recorded a forward pass since.
        """
        return self._looked or self._sequence < 0 or _sequence_number() != self._sequence

    def jump_to(self, step: int) -> None:
        """Give the step under way another number."""
        self._draft.step = step

    def log(self, values: Mapping[str, float | Arrival]) -> None:
        """Add to the step under way."""
        self._draft.scalars.update(values)

    def flush(self) -> None:
        """Wait for everything that is on its way."""
        while self._queue:
            self._read(self._queue.popleft())
        self._land()

    def close(self, wait: bool) -> None:
        """Hand on what is left; without waiting where other ranks may be gone."""
        if wait or self._group is None:
            self.flush()

    def _looks_closer(self) -> bool:
        return self._histograms.due(self.step) or self._closer(self.step)

    def _gradient(self, row: int) -> Tensor:
        """This rank's part of a gradient; empty where it is gone by now."""
        gradient = self._parameters[row].grad
        return torch.empty(0) if gradient is None else local_part(gradient)

    # Reading and merging.

    def _read(self, draft: _Draft) -> None:
        if not self._measures:
            return
        rows, norms = _norms_of(draft)
        wide = _wide_of(draft, len(self._parameters))
        if self._group is None:
            self._deliver(self._measured(draft, rows, norms, wide))
            return
        table = np.zeros((len(self._parameters), 5))
        nan, inf = norms.counts or (np.zeros(len(rows)), np.zeros(len(rows)))
        table[rows] = np.stack([norms.l2, norms.max_abs, nan, inf, np.ones(len(rows))], axis=1)
        table[self._left_out, :4] = 0
        self._land()
        gathering = self._group.start_gather(table)
        widest = None
        if wide is not None:
            wide[self._left_out] = 0
            widest = self._group.start_sum(wide)
        self._in_flight = (draft, gathering, widest)

    def _land(self) -> None:
        """Finish the merge under way and hand the step on."""
        if self._in_flight is None:
            return
        draft, gathering, widest = self._in_flight
        self._in_flight = None
        table = merge_ranks(np.stack(gathering.wait()))
        wide = widest.wait()[0] if widest is not None else None
        if rank() == 0:
            rows = np.flatnonzero(table[:, 4]).tolist()
            norms = summed_up(table[rows, 0], table[rows, 1])
            if norms.counts is not None:
                norms.counts = (table[rows, 2], table[rows, 3])
            self._deliver(self._measured(draft, rows, norms, wide))

    def _measured(
        self, draft: _Draft, rows: list[int], norms: Norms, wide: Floats | None
    ) -> Measured:
        kept = norms if rows and self._stats.due(draft.step) else None
        scalars = draft.scalars
        step = Step(
            step=draft.step,
            time=draft.time,
            loss=_arrived(scalars.pop("loss", None)),
            lr=_arrived(scalars.pop("lr", None)) if "lr" in scalars else _plain(draft.lr),
            total_norm=kept.total if kept is not None else None,
            clip_coef=_clip_coefficient(draft.used),
            scale=next((used.look.factor() for used in draft.used if used.scaled), None),
            skipped=any(bool(skipped) for skipped in draft.skipped),
            gradient=draft.gradient,
            scalars={name: _arrived(value) for name, value in scalars.items()} | draft.group_lrs,  # type: ignore[arg-type]
        )
        measured = Measured(
            step, rows, kept, None, None, notes=draft.notes, loss=_arrived(draft.loss)
        )
        if wide is not None:
            measured.histogram_counters, measured.update_sums = (
                wide[rows, :-UPDATE_COLUMNS],
                wide[rows, -UPDATE_COLUMNS:],
            )
            measured.kept = self._histograms.due(draft.step)
            measured.dead_shares = self._units.dead_shares() if self._units is not None else {}
        return measured


def _norms_of(draft: _Draft) -> tuple[list[int], Norms]:
    """This rank's norms, and the parameters they are of, in the model's order."""
    if len(draft.used) == 1 and len(draft.used[0].rows) == len(draft.used[0].look.rows):
        look = draft.used[0].look
        return look.rows, look.numbers().divided_by(look.factor() if draft.used[0].scaled else 1.0)
    table: dict[int, tuple[float, ...]] = {}
    for used in draft.used:
        norms = used.look.numbers().divided_by(used.look.factor() if used.scaled else 1.0)
        nan, inf = norms.counts or (np.zeros(len(norms.l2)), np.zeros(len(norms.l2)))
        for row in used.rows:
            place = used.look.rows.index(row)
            table[row] = (norms.l2[place], norms.max_abs[place], nan[place], inf[place])
    rows = sorted(table)
    columns = np.array([table[row] for row in rows]).reshape(len(rows), 4).T
    norms = summed_up(columns[0], columns[1])
    if norms.counts is not None:
        norms.counts = (columns[2], columns[3])
    return rows, norms


def _wide_of(draft: _Draft, size: int) -> Floats | None:
    """On histogram steps, per parameter: the counters of its histogram and the sums of its update."""
    wide = None
    for used in draft.used:
        if used.look.histograms is None:
            continue
        counters = used.look.histograms.read()
        wide = np.zeros((size, counters.shape[1] + UPDATE_COLUMNS)) if wide is None else wide
        wide[used.rows, :-UPDATE_COLUMNS] = counters[
            [used.look.rows.index(row) for row in used.rows]
        ]
        if used.update is not None:
            wide[used.update_rows, -UPDATE_COLUMNS:] = used.update.read()
    return wide


def _clip_coefficient(all_used: Sequence[Used]) -> float | None:
    """The one number by which every optimizer's gradients were scaled down; None where there is
    none.
    """
    found = []
    for used in all_used:
        if used.probe is None:
            return None
        factor = used.look.factor() if used.scaled else 1.0
        used.look.numbers()
        found.append(
            used.probe.coefficient(used.look.norms, factor / (factor if used.still_scaled else 1.0))
        )
    first = found[0] if found else None
    alike = first is not None and all(
        value is not None and abs(value - first) <= 1e-4 * first for value in found
    )
    return first if alike else None


def _learning_rates(optimizer: Optimizer) -> tuple[float | Tensor | None, dict[str, float]]:
    """The first group's learning rate, and all of them by name where groups differ."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    plain = [rate for rate in rates if isinstance(rate, (int, float))]
    named = (
        {f"lr/{number}": float(rate) for number, rate in enumerate(plain)}
        if len(set(plain)) > 1
        else {}
    )
    first = rates[0] if rates else None
    return (first.detach().clone() if isinstance(first, Tensor) else first), named


def _scale_of(scaler: torch.amp.GradScaler | None) -> Arrival | None:
    """The scaler's factor at this moment, without waiting for it."""
    if scaler is None:
        return None
    factor = getattr(scaler, "_scale", None)
    return Arrival(
        factor.detach().clone().view(1)
        if isinstance(factor, Tensor)
        else torch.tensor([scaler.get_scale()])
    )


def _plain(value: float | Tensor | None) -> float | None:
    return None if value is None else float(value)


def _arrived(value: float | Arrival | None) -> float | None:
    return float(value.read().reshape(-1)[0]) if isinstance(value, Arrival) else value


def _sequence_number() -> int:
    """Autograd's count of the operations it has recorded in this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def take_scalars(values: Mapping[str, object]) -> dict[str, float | Arrival]:
    """What a user logs: numbers as they are, tensors on their way to the host."""
    taken: dict[str, float | Arrival] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            tensor = value.detach().reshape(-1)
            if tensor.numel() != 1:
                raise UsageError(
                    f"{name} must be a single number, got a tensor of shape {tuple(value.shape)}"
                )
            taken[name] = float(tensor) if tensor.device.type == "cpu" else Arrival(tensor.clone())
        elif isinstance(value, (int, float, np.number)):
            taken[name] = float(value)
        else:
            raise UsageError(f"{name} must be a single number, got {type(value).__name__}")
    return taken
