"""Builds one finished step from what is measured at its moments, merged over ranks.

Steps are returned in order, each once, as soon as its numbers have arrived: a step is never waited
for while the device may still be busy with it.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsight.core.gradient_parts import gradient_parts, lies_like_its_parameter
from gradsight.core.group import PendingArrays, ProcessGroup
from gradsight.core.meeting import pauses
from gradsight.core.parameters import Named
from gradsight.core.shards import are_spread, local_part
from gradsight.measure.clipping import (
    ClipProbe,
    ClipReading,
    is_unchanged,
    joint_coefficient,
    remaining_share,
)
from gradsight.measure.details import details_in
from gradsight.measure.histogram import HistogramReading
from gradsight.measure.host_copy import HostCopy, loss_scale
from gradsight.measure.norms import NormReading, recount, what_weights_are
from gradsight.measure.rank_table import merge_tables, norms_in, rank_table
from gradsight.measure.units import UnitLife
from gradsight.measure.update import LeftWeights, UpdateReading
from gradsight.session.expert_looks import ExpertLooks
from gradsight.session.readings import (
    GradientReading,
    StepInProgress,
    UsedGradients,
    after_doubts,
    arrived,
    detail_sums,
    learning_rates,
    norms_of,
    skipped_by,
)
from gradsight.session.signals import SeenLoss
from gradsight.values.experts import ExpertGroup
from gradsight.values.measured import (
    BrokenWeights,
    Floats,
    MeasuredStep,
    Norms,
    RankComparison,
    RankDigests,
    StepSignals,
)
from gradsight.values.steps import PART_GRADIENT, TRUE_GRADIENT, CloserLooks, Schedule, Step

_LAG = 1
"""Steps that may be on their way from the device before somebody waits for the oldest."""


@dataclass(frozen=True, slots=True)
class MeasuringPlan:
    """What is measured, and when."""

    first_step: int
    norms: Schedule
    histograms: Schedule
    closer_looks: CloserLooks | None
    """Details for the judge alone, beside those of the histograms' schedule."""
    unit_rows: tuple[int, ...] = ()
    """Weights whose dead units are counted."""
    experts: tuple[ExpertGroup, ...] = ()
    """Experts whose norms are taken one by one."""
    on_every_rank: bool = False
    """Whether ranks look at their gradients also where rank 0's are the same."""
    every_step: bool = False
    """Whether norms are read on every step, due or not: a bad one is to be left out."""
    at_once: bool = False
    """Whether norms are read as soon as backward has returned, though that waits for the device."""

    def wants_details(self, step: int) -> bool:
        """Whether this step is looked at closely."""
        if self.histograms.due(step):
            return True
        return self.closer_looks is not None and self.closer_looks.due(step)


@dataclass(frozen=True, slots=True)
class _Merge:
    """A step whose numbers are being gathered from all ranks."""

    step: StepInProgress
    tables: PendingArrays
    details: PendingArrays | None


class StepBuilder:
    """Takes the readings of the step under way; returns finished steps."""

    def __init__(
        self,
        parameters: Sequence[Named],
        plan: MeasuringPlan,
        group: ProcessGroup,
        left_out: Sequence[bool] = (),
    ) -> None:
        """`left_out`: the parameters of which another rank's part is counted."""
        self._parameters = [named.tensor for named in parameters]
        self._names = [named.name for named in parameters]
        self._plan = plan
        spread = are_spread(self._parameters)
        self._sharded = spread and group.size > 1
        self._group = group if self._sharded else None
        self._left_out = list(left_out)
        self._is_first = group.is_first
        self._measures = self._group is not None or self._is_first
        # Replicated gradients are whole on every rank; of sharded ones this rank has its part.
        self._sees_part = spread and group.incomplete is not None
        self._units = UnitLife(plan.unit_rows)
        self._experts = ExpertLooks(plan.experts, self._parameters, self._left_out)
        self._readings: dict[int, GradientReading] = {}  # by row, until its optimizer has stepped
        self._left: dict[tuple[int, ...], LeftWeights] = {}
        self._queue: deque[StepInProgress] = deque()
        self._merge: _Merge | None = None
        self._current = StepInProgress(plan.first_step)
        self._looked = False
        self._made_any = False
        self._sequence = -1
        """Autograd's count of operations when the last step was made."""
        self._logged_ahead: set[str] = set()
        """Names that were logged before the first backward pass."""

    def continue_from(self, before: "StepBuilder") -> None:
        """Take over what was logged to the step under way, and how logging is done."""
        self._current.scalars.update(before._current.scalars)
        self._made_any = before._made_any
        self._sequence = before._sequence
        self._logged_ahead = before._logged_ahead

    # The moments of a step.

    def gradients_ready(
        self,
        rows: Sequence[int],
        scaler: torch.amp.GradScaler | None,
        or_next: bool = False,
    ) -> GradientReading | None:
        """Measure these gradients now, if anything is due.

        `or_next`: they may be those of the next step.
        """
        self._looked = True
        plan = self._plan
        steps = (self.step, self.step + 1) if or_next else (self.step,)
        wants_details = self._measures and any(map(plan.wants_details, steps))
        wants_norms = wants_details or plan.every_step or any(map(plan.norms.due, steps))
        if not wants_norms or not (self._measures or self._plan.on_every_rank):
            return None
        gradients = self._gradients(rows)
        reading = GradientReading(list(rows), NormReading(gradients), loss_scale(scaler))
        # A recount reads the gradients themselves, so it must happen while they are what they were.
        if self._plan.at_once or reading.ready():
            reading.known = recount(gradients, reading.read())
            if reading.known.counts is not None:
                self._current.weights_were = self._what_weights_are()
        if wants_details:
            reading.histograms = HistogramReading(gradients, offset=self.step)
            self._units.look(self.step, rows, gradients)
        # What sharded ranks have seen goes over the wire, so not on every step.
        if wants_details or (self._measures and not self._sharded):
            reading.experts = self._experts.look(rows, gradients)
        # A later look of the same step replaces this one: the last before the update is the truth.
        for row in rows:
            self._readings[row] = reading
        return reading

    def readings_of(self, rows: Sequence[int]) -> list[GradientReading]:
        """The readings in which these rows were looked at last, each once."""
        known = [self._readings[row] for row in rows if row in self._readings]
        return list({id(reading): reading for reading in known}.values())

    def forget(self, rows: Sequence[int]) -> None:
        """These gradients were taken away before the optimizer could use them."""
        for row in rows:
            self._readings.pop(row, None)

    def is_broken(self, rows: Sequence[int]) -> bool:
        """Whether a gradient of these was seen to hold a NaN or an infinity."""
        known = [reading.known for reading in self.readings_of(rows)]
        return any(norms is not None and norms.counts is not None for norms in known)

    def is_unchanged(self, rows: Sequence[int], unscaled: bool) -> bool:
        """Whether an edit has left these gradients as they were, where that can be told.

        `unscaled`: a scaler has taken out its factor that was in them when they were looked at.
        """
        readings = self.readings_of(rows)
        if len(readings) != 1 or readings[0].known is None or self._sharded:
            return False
        reading = readings[0]
        now = self.again(reading.rows).norms
        if now.is_from_device:
            return False
        now.read()
        return is_unchanged(reading.norms, now, reading.factor() if unscaled else 1.0)

    def again(self, rows: Sequence[int]) -> GradientReading:
        """This rank's parts of these gradients as they are now; not for the record."""
        gradients = [self._gradient(row) for row in rows]
        return GradientReading(list(rows), NormReading(gradients), scale=None)

    def before_update(
        self,
        rows: Sequence[int],
        scaler: torch.amp.GradScaler | None,
        edited_alike: bool = True,
    ) -> tuple[GradientReading, ClipReading] | None:
        """See what the optimizer is about to use, and keep what it is about to change.

        The reading and how much of it is used, where all its gradients were looked at together.
        `scaler`: its factor is still in them. `edited_alike`: the same was done to all of them.
        """
        current = self._current
        readings = self.readings_of(rows)
        if not readings:
            return None
        if self._measures and self._plan.wants_details(self.step):
            weights = [local_part(self._parameters[row]) for row in rows]
            current.update_rows = list(rows)
            left = self._left.pop(tuple(rows), None)
            current.update = UpdateReading(weights, offset=self.step, left=left)
        # Gradients of several looks have no one clip coefficient.
        current.clip = None
        if len(readings) > 1 or not edited_alike:
            return None
        reading = readings[0]
        mine = None
        if len(rows) < len(reading.rows) or self._sharded:
            mine = {reading.rows.index(row) for row in rows if self._can_be_probed(row, reading)}
        probe = ClipProbe(reading.norms, mine, lambda place: self._gradient(reading.rows[place]))
        current.clip = ClipReading(probe, reading.norms, reading.scale, scaler is not None)
        return reading, current.clip

    def after_update(
        self,
        rows: Sequence[int],
        optimizer: Optimizer | None,
        scaled: bool,
        skipped: bool | Tensor,
        edited_inside: bool = False,
    ) -> None:
        """Take the readings of these rows as what this optimizer stepped with.

        `edited_inside`: it has edited its gradients itself, so no clip coefficient is known.
        """
        current = self._current
        if current.update is not None:
            # Compared from the first look to the second and from that to the third, no longer.
            keep = self.step - self._plan.first_step < 2
            left = current.update.finish(keep)
            if left is not None:
                self._left[tuple(current.update_rows)] = left
        clip = None if edited_inside else current.clip
        if clip is not None and clip.scale is not None and not scaled:
            clip = replace(clip, scale=None)
        # An optimizer that steps later with the same parameters has made the step, not the first.
        again = {row for used in current.used for row in used.rows}.intersection(rows)
        if again:
            kept = [used.without(again) for used in current.used]
            current.used = [used for used in kept if used.rows]
        if optimizer is not None and (again or not current.lrs):
            current.lrs = learning_rates(optimizer)
        by_reading: dict[int, tuple[GradientReading, list[int]]] = {}
        for row in rows:
            reading = self._readings.pop(row, None)
            if reading is not None:
                by_reading.setdefault(id(reading), (reading, []))[1].append(row)
        for reading, taken in by_reading.values():
            used = UsedGradients(reading, taken, scaled, clip, current.update, current.update_rows)
            current.used.append(used)
            current.update = None
            current.update_rows = ()
        current.clip = None
        current.update = None
        current.update_rows = ()
        current.skipped.append(skipped_by(skipped))

    def clipped_while_scaled(self, limit: float) -> None:
        """The gradients were clipped to this limit while a scaler's factor was in them."""
        self._current.scaled_limit = limit

    def end_step(
        self,
        gradient: str,
        signals: StepSignals,
        seen: SeenLoss,
        rank_comparisons: Sequence[RankComparison],
        doubts: Sequence[HostCopy] = (),
        rank_digests: Sequence[RankDigests] = (),
    ) -> None:
        """The step is made, and on its way."""
        made = self._current
        made.time = time.time()
        made.gradient = gradient
        if self._sees_part and gradient == TRUE_GRADIENT:
            made.gradient = PART_GRADIENT
        made.doubts = doubts
        made.signals = signals
        made.rank_comparisons = tuple(rank_comparisons)
        made.rank_digests = tuple(rank_digests)
        if seen.loss is not None:
            made.loss = HostCopy.of(seen.loss.reshape(1).clone())
        made.guess = seen.guess
        made.unigram = seen.unigram
        made.passes = seen.passes
        if any(used.reading.histograms is not None for used in made.used):
            made.units = self._units.reading()
        self._current = StepInProgress(made.number + 1)
        self._looked = False
        self._made_any = True
        self._sequence = _sequence_number()
        self._queue.append(made)

    def finished(self) -> list[MeasuredStep]:
        """The steps that have arrived by now."""
        finished = []
        # At least one step is left on its way: reading the newest would wait for the device.
        while self._queue and (len(self._queue) > _LAG or self._queue[0].ready()):
            finished += self._read(self._queue.popleft())
        return finished

    def clips(self) -> list[ClipReading | None]:
        """How much the optimizers of the step under way have used of what was looked at."""
        return [used.clip for used in self._current.used]

    def remaining_share(self, measured: MeasuredStep) -> float | None:
        """What is left now of every gradient of a finished step alike; None if not one number."""
        if measured.norms is None or self._group is not None:
            return None
        rows: Sequence[int] = range(len(self._parameters))
        if measured.rows is not None:
            rows = measured.rows
        gradients = self._gradients(rows)
        if any(gradient.numel() == 0 for gradient in gradients):
            return None
        return remaining_share(measured.norms, recount(gradients, NormReading(gradients).read()))

    def used(self) -> list[UsedGradients]:
        """What the optimizers of the step under way have stepped with so far."""
        return self._current.used

    @property
    def newest(self) -> StepInProgress | None:
        """The last step that was made, as long as it is on its way."""
        return self._queue[-1] if self._queue else None

    def flush(self, patience: float | None = None) -> list[MeasuredStep]:
        """Wait for everything that is on its way, at most so many seconds for the other ranks."""
        ends = None if patience is None else time.monotonic() + patience
        finished: list[MeasuredStep] = []
        while self._queue:
            if ends is not None and not self._has_merged_by(ends):
                return finished
            finished += self._read(self._queue.popleft())
        if ends is not None and not self._has_merged_by(ends):
            return finished
        return finished + self._land()

    def _has_merged_by(self, ends: float) -> bool:
        """Wait for the merge under way; whether it is there by then."""
        merge = self._merge
        if merge is None:
            return True
        arrays = [each for each in (merge.tables, merge.details) if each is not None]
        for pause in pauses():
            if all(each.done() for each in arrays):
                return True
            if time.monotonic() > ends:
                return False
            time.sleep(pause)
        return False

    # The step under way.

    @property
    def step(self) -> int:
        """The number of the step under way."""
        return self._current.number

    @property
    def is_merged(self) -> bool:
        """Whether finishing a step needs the other ranks."""
        return self._group is not None

    @property
    def begun(self) -> bool:
        """Whether the step under way has begun: a backward pass has written its gradients."""
        return self._looked or not self._made_any

    def is_of_step_under_way(self, name: str) -> bool:
        """Whether a number logged now under this name is of the step under way.

        Else it is of the step just made. After its backward pass that is clear. Before, only a loop
        that began by logging this name before its first backward pass means the step to come; and
        not even that one if autograd has recorded nothing since the last step.
        """
        if self._looked:
            return True
        if not self._made_any:
            self._logged_ahead.add(name)
            return True
        return name in self._logged_ahead and _sequence_number() != self._sequence

    def jump_to(self, step: int) -> None:
        """Give the step under way another number."""
        self._current.number = step

    def log(self, values: Mapping[str, float | HostCopy]) -> None:
        """Add to the step under way."""
        self._current.scalars.update(values)

    def log_to_last(self, values: Mapping[str, float | HostCopy]) -> bool:
        """Add to the step just made, as long as it is on its way; False where it has arrived."""
        if not self._queue:
            return False
        self._queue[-1].scalars.update(values)
        return True

    def _gradients(self, rows: Sequence[int]) -> list[Tensor]:
        if self._sharded:
            return gradient_parts([self._parameters[row] for row in rows])
        return [self._gradient(row) for row in rows]

    def _can_be_probed(self, row: int, reading: GradientReading) -> bool:
        """Whether a rank can look at this gradient again by itself."""
        return row in reading.rows and lies_like_its_parameter(self._parameters[row])

    def _gradient(self, row: int) -> Tensor:
        """This rank's part of a gradient; empty where it is gone by now."""
        gradient = self._parameters[row].grad
        return torch.empty(0, device="cpu") if gradient is None else local_part(gradient)

    # Reading and merging.

    def _read(self, made: StepInProgress) -> list[MeasuredStep]:
        if not self._measures:
            return []
        size = len(self._parameters)
        rows, norms = norms_of(made, size)
        sums = self._sums(made)
        if self._group is None:
            return [self._finished(made, rows, norms, sums)]
        # One merge at a time: the one before is finished first, so that steps stay in order.
        landed = self._land()
        tables = self._group.start_gather(rank_table(norms, rows, size, self._left_out))
        details = None
        if sums is not None:
            details = self._group.start_sum(sums)
        self._merge = _Merge(made, tables, details)
        return landed

    def _sums(self, made: StepInProgress) -> Floats | None:
        """What this rank saw of experts, and at a closer look, in one row of numbers."""
        size = len(self._parameters)
        sums = detail_sums(made, size)
        if sums is None:
            is_looked_at = bool(self._plan.experts) and self._group is None
            return self._experts.sums(made) if is_looked_at else None
        if self._group is not None:
            sums[self._left_out] = 0
        # In one row, so that it is one message to the other ranks.
        return np.concatenate([self._experts.sums(made), sums.ravel()])

    def _land(self) -> list[MeasuredStep]:
        """Finish the merge under way."""
        merge = self._merge
        if merge is None:
            return []
        self._merge = None
        table = merge_tables(np.stack(merge.tables.wait()))
        sums = None if merge.details is None else merge.details.wait()[0]
        if not self._is_first:
            return []
        rows, norms = norms_in(table)
        return [self._finished(merge.step, rows, norms, sums)]

    def _finished(
        self, made: StepInProgress, rows: list[int], norms: Norms, sums: Floats | None
    ) -> MeasuredStep:
        has_norms = bool(rows) and self._plan.norms.due(made.number)
        step = _step_record(made, norms.total if has_norms else None)
        details = None
        experts: dict[str, Floats] = {}
        if sums is not None:
            experts = self._experts.norms(sums[: self._experts.width], rows, norms)
            sums = sums[self._experts.width :]
        if sums is not None and len(sums):
            recorded = self._plan.histograms.due(made.number)
            names = self._names if recorded else None
            dead_shares = {} if made.units is None else made.units.read()
            table = sums.reshape(len(self._parameters), -1)
            details = details_in(table, rows, dead_shares, made.number, names)
        loss = step.loss if made.loss is None else made.loss.number()
        guess = None if made.guess is None else arrived(made.guess)
        unigram = None if made.unigram is None else arrived(made.unigram)
        passes = None if made.passes is None else made.passes.read()
        broken = None
        if norms.counts is not None and not step.skipped:
            broken = self._broken_weights(made)
        return MeasuredStep(
            step=step,
            rows=None if len(rows) == len(self._parameters) else tuple(rows),
            norms=norms if has_norms else None,
            details=details,
            experts=experts,
            signals=replace(
                made.signals,
                loss=loss,
                guess=guess,
                unigram=unigram,
                passes=passes,
                broken_weights=broken,
                scaled_limit=made.scaled_limit,
            ),
            rank_comparisons=made.rank_comparisons,
            rank_digests=made.rank_digests,
        )

    def _broken_weights(self, made: StepInProgress) -> BrokenWeights | None:
        """What became of the weights in a step whose gradient was broken."""
        if made.weights_were is not None:
            # They were so when this step's forward pass ran: the step before has done it.
            return BrokenWeights(max(made.number - 1, self._plan.first_step), made.weights_were)
        are = self._what_weights_are()
        return None if are is None else BrokenWeights(made.number, are)

    def _what_weights_are(self) -> str | None:
        return what_weights_are([local_part(parameter) for parameter in self._parameters])


def _step_record(made: StepInProgress, total_norm: float | None) -> Step:
    """The step as the record keeps it; loss and lr are what was logged, where it was."""
    scalars = {name: arrived(value) for name, value in made.scalars.items()}
    lrs = {name: arrived(value) for name, value in made.lrs.items()}
    lr = lrs.pop("lr", None)
    return Step(
        step=made.number,
        time=made.time,
        loss=scalars.pop("loss", None),
        lr=scalars.pop("lr", lr),
        total_norm=total_norm,
        clip_coef=joint_coefficient([used.clip for used in made.used]),
        scale=_scale(made.used),
        skipped=made.was_skipped,
        gradient=after_doubts(made.gradient, made.doubts),
        scalars=scalars | lrs,
    )


def _scale(all_used: Sequence[UsedGradients]) -> float | None:
    """The loss scale that was in the gradients when they were looked at."""
    for used in all_used:
        if used.scaled and used.reading.scale is not None:
            return used.reading.factor()
    return None


def _sequence_number() -> int:
    """Autograd's count of the operations it has recorded in this thread."""
    return int(torch._C._autograd._get_sequence_nr())
