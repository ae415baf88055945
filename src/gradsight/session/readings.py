"""What is measured while a step is under way: started on the device, read when it has arrived."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from gradsight.errors import UsageError
from gradsight.measure.clipping import ClipReading
from gradsight.measure.details import DetailTable
from gradsight.measure.experts import ExpertReading
from gradsight.measure.histogram import HistogramReading
from gradsight.measure.host_copy import HostCopy
from gradsight.measure.norms import NormReading
from gradsight.measure.rank_table import norms_in, rank_table
from gradsight.measure.units import UnitReading
from gradsight.measure.update import UpdateReading
from gradsight.session.step_passes import PassesOnTheWay
from gradsight.values.measured import Floats, Norms, RankComparison, RankDigests, StepSignals
from gradsight.values.steps import CHANGED_GRADIENT


@dataclass(slots=True)
class GradientReading:
    """The gradients of some parameters at one moment."""

    rows: list[int]
    norms: NormReading
    scale: HostCopy | None
    """The factor of a GradScaler that was in them."""
    known: Norms | None = None
    """The norms, once they have arrived; a scaler's factor is still in them."""
    histograms: HistogramReading | None = None
    experts: ExpertReading | None = None

    def ready(self) -> bool:
        """Whether reading would not wait."""
        parts = (self.norms, self.scale, self.histograms, self.experts)
        return all(part is None or part.ready() for part in parts)

    def read(self) -> Norms:
        """The norms; on an accelerator without what only a recount could have told."""
        if self.known is None:
            self.known = self.norms.read()
        return self.known

    def factor(self) -> float:
        """The scaler's factor."""
        return 1.0 if self.scale is None else self.scale.number()


@dataclass(frozen=True, slots=True)
class UsedGradients:
    """What one optimizer stepped with."""

    reading: GradientReading
    rows: list[int]
    scaled: bool
    """Whether a scaler's factor was in the gradients when they were looked at."""
    clip: ClipReading | None
    update: UpdateReading | None = None
    update_rows: Sequence[int] = ()

    def norms(self) -> Norms:
        """The norms of everything that was looked at, without a scaler's factor."""
        norms = self.reading.read()
        return norms.divided_by(self.reading.factor()) if self.scaled else norms

    def ready(self) -> bool:
        """Whether reading would not wait."""
        parts = (self.reading, self.clip, self.update)
        return all(part is None or part.ready() for part in parts)

    def without(self, rows: Collection[int]) -> "UsedGradients":
        """The same without some of its rows."""
        return replace(self, rows=[row for row in self.rows if row not in rows])

    def places(self) -> list[int]:
        """Where this optimizer's parameters are among those that were looked at."""
        return [self.reading.rows.index(row) for row in self.rows]


@dataclass(slots=True)
class StepInProgress:
    """A step under way, then on its way from the device."""

    number: int
    time: float = 0.0
    gradient: str = ""
    doubts: Sequence[HostCopy] = ()
    """Whether it was changed between passes, where only the device knows."""
    scalars: dict[str, float | HostCopy] = field(default_factory=dict)
    used: list[UsedGradients] = field(default_factory=list)
    clip: ClipReading | None = None
    """Of the optimizer that is about to step; so are the next two."""
    update: UpdateReading | None = None
    update_rows: Sequence[int] = ()
    lrs: Mapping[str, float | HostCopy] = field(default_factory=dict)
    """The first group's learning rate as "lr", and all of them where groups differ."""
    skipped: list[bool | HostCopy] = field(default_factory=list)
    signals: StepSignals = field(default_factory=StepSignals)
    loss: HostCopy | None = None
    weights_were: str | None = None
    """"NaN" or "infinite" where they were so before the optimizer stepped; looked at where the
    gradient was known to be broken by then.
    """
    guess: float | HostCopy | None = None
    """What the loss would be if the model knew nothing."""
    unigram: float | HostCopy | None = None
    """What it would be if the model knew how frequent each class is, and nothing else."""
    passes: PassesOnTheWay | None = None
    """What its backward passes were like, where they were looked at."""
    scaled_limit: float | None = None
    """The limit of a clipping that came while a scaler's factor was in the gradients."""
    units: UnitReading | None = None
    rank_comparisons: tuple[RankComparison, ...] = ()
    rank_digests: tuple[RankDigests, ...] = ()

    def ready(self) -> bool:
        """Whether reading would not wait: everything that will be read is there."""
        seen = (self.guess, self.unigram)
        numbers = (*self.scalars.values(), *self.lrs.values(), *self.skipped, *seen)
        on_their_way = [each for each in numbers if isinstance(each, HostCopy)]
        parts = (*self.used, *on_their_way, *self.doubts, self.loss, self.units, self.passes)
        return all(part is None or part.ready() for part in parts)

    @property
    def was_skipped(self) -> bool:
        """Whether an optimizer left the step out. Waits for the device."""
        return any(bool(arrived(skipped)) for skipped in self.skipped)


def norms_of(step: StepInProgress, size: int) -> tuple[list[int], Norms]:
    """This rank's norms, and the parameters they are of, in the model's order."""
    if len(step.used) == 1 and len(step.used[0].rows) == len(step.used[0].reading.rows):
        return step.used[0].reading.rows, step.used[0].norms()
    # Several optimizers, or several looks: each has its own rows of one table.
    table = np.zeros((size, 5))
    for used in step.used:
        seen = rank_table(used.norms(), used.reading.rows, size)
        table[used.rows] = seen[used.rows]
    return norms_in(table)


def detail_sums(step: StepInProgress, size: int) -> Floats | None:
    """This rank's sums of a closer look; None where the step has none."""
    if all(used.reading.histograms is None for used in step.used):
        return None
    table = DetailTable(size)
    for used in step.used:
        if used.reading.histograms is not None:
            counters = used.reading.histograms.read()
            table.add_histograms(used.rows, counters[used.places()])
            if used.update is not None:
                table.add_updates(used.update_rows, used.update.read())
    return table.sums


def learning_rates(optimizer: Optimizer) -> dict[str, float | HostCopy]:
    """The first group's learning rate as "lr", and all of them by number where groups differ."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    found: dict[str, float | HostCopy] = {}
    if rates and rates[0] is not None:
        found["lr"] = _on_its_way(rates[0])
    plain = [float(rate) for rate in rates if isinstance(rate, (int, float))]
    if len(set(plain)) > 1:
        found |= {f"lr/{number}": rate for number, rate in enumerate(plain)}
    return found


def _on_its_way(number: float | Tensor) -> float | HostCopy:
    """A number as it is now, without waiting for the device that it is on."""
    if isinstance(number, Tensor):
        return HostCopy.of(number.detach().reshape(-1)[:1].clone())
    return float(number)


def skipped_by(flag: bool | Tensor) -> bool | HostCopy:
    """Whether an optimizer left a step out, as it says: at once, or on its device."""
    if isinstance(flag, Tensor):
        return HostCopy.of(flag.detach().reshape(-1)[:1].clone())
    return flag


def take_scalars(values: Mapping[str, object]) -> dict[str, float | HostCopy]:
    """The numbers that a user logs: as they are, or as tensors on their way to the host."""
    taken: dict[str, float | HostCopy] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            tensor = value.detach().reshape(-1)
            if tensor.numel() != 1:
                raise UsageError(
                    f"{name} must be a single number, got a tensor of shape {tuple(value.shape)}"
                )
            copy = HostCopy.of(tensor.clone())
            taken[name] = copy if copy.is_from_device else copy.number()
        elif isinstance(value, (int, float, np.number)):
            taken[name] = float(value)
        else:
            raise UsageError(f"{name} must be a single number, got {type(value).__name__}")
    return taken


def after_doubts(gradient: str, doubts: Sequence[HostCopy]) -> str:
    """What a gradient was, once it is known whether it was changed between passes."""
    return CHANGED_GRADIENT if any(doubt.number() for doubt in doubts) else gradient


def arrived(value: float | HostCopy) -> float:
    """A number that may be on its way; waits for it."""
    if isinstance(value, HostCopy):
        return value.number()
    return value
