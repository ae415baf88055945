"""What a check may look at: the step just made, what came before it, and what is known of the
model.
"""

from collections import deque
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
import numpy.typing as npt

from gradsight.health.baseline import Baseline, logarithms
from gradsight.values.steps import Step, block_of

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_KEPT = 400
"""Steps of history that trends are read from."""
_RANK_LOOKS = 60
NOTHING = 1e-40
"""Stands for a norm of zero where logarithms are compared."""
_LOOKS = 4
"""Closer looks that are remembered."""


@dataclass(slots=True)
class Subject:
    """What is known of the model and its optimizers before any gradient is seen; lists are over the
    parameters.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    trainable: list[bool]
    kinds: list[str]
    """The class of the module that owns the parameter."""
    half: list[bool]
    """Whether its values are float16."""
    memberships: list[int] | None = None
    """How often an optimizer was given the parameter; None where no optimizer is known."""

    @property
    def matrices(self) -> list[int]:
        """Parameters that mix features: two or more dimensions, and not a lookup table."""
        return [
            row
            for row, (shape, kind) in enumerate(zip(self.shapes, self.kinds, strict=True))
            if len(shape) >= 2 and "embedding" not in kind.lower()
        ]


@dataclass(slots=True)
class Closer:
    """A closer look, taken on some steps only. Arrays are over all parameters, NaN where nothing is
    known.
    """

    step: int
    update_ratio: Floats
    zero_share: Floats
    """The share of entries that are exactly zero."""
    tiny_share: Floats
    """The share of entries that are not zero, but below float16's smallest normal number."""
    dead_share: Floats
    """The share of rows of a weight that stayed zero in every one of the last looks."""
    weight: Floats
    """Sum of squares of the weight before the step, where all of it was read."""


@dataclass(slots=True)
class RankLook:
    """What every rank brought to the common gradient of one step, before reduction."""

    step: int
    rows: npt.NDArray[np.intp]
    """The parameters that were looked at."""
    norms: Floats
    """Of each rank's own gradients, [ranks, rows]."""
    always: Flags
    """Which of the rows are looked at on every step, so that their norms can be compared over time.
    """


@dataclass(slots=True)
class Observed:
    """One step as it comes in. Arrays are over `rows`, or over all parameters where that is None."""

    step: Step
    rows: list[int] | None = None
    l2: Floats | None = None
    max_abs: Floats | None = None
    counts: tuple[Floats, Floats] | None = None
    total: float = 0.0
    closer: Closer | None = None
    loss: float | None = None
    uncleared: bool | None = None
    """Whether the optimizer stepped on gradients that nobody had cleared since its last step; None
    where that is not known.
    """
    alike: int | None = None
    """How many batches in a row were the same; None where no batch was seen."""
    half: bool | None = None
    """Whether the forward pass ran under float16 autocast."""
    fixed: bool = False
    """Whether every batch so far was the same one."""
    guess: float | None = None
    """What the loss would be if the model knew nothing; None where it is of no kind that tells."""


@dataclass(slots=True)
class Window:
    """The current step and its past. Only finite norms are in `totals` and in the baseline."""

    subject: Subject
    now: Observed = field(default_factory=lambda: Observed(Step(0, 0.0)))
    steps_seen: int = 0
    l2: Floats = field(default_factory=lambda: np.zeros(0))
    """Norm of every parameter's gradient at this step, NaN where it has none."""
    logarithms: Floats = field(default_factory=lambda: np.zeros(0))
    """Of `l2` and, last, of the total."""
    previous: Floats = field(default_factory=lambda: np.zeros(0))
    """The same of the step before."""
    previous_total: float = 0.0
    effective: float = 0.0
    """The norm that the optimizer used: after clipping, where that is known."""
    baseline: Baseline = field(default_factory=Baseline)
    first_step: int = 0
    totals: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    first_losses: list[float] = field(default_factory=list)
    starts: list[tuple[float, float]] = field(default_factory=list)
    """Of the first three steps: the loss, and what it would be if the model knew nothing."""
    clips: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    scales: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Loss scale, and whether the step was left out."""
    closers: deque[Closer] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    looks_taken: int = 0
    ever_updated: bool = False
    """Whether any closer look found that a step had changed a weight."""
    alive: Flags = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """Parameters that have had a gradient other than zero."""
    all_alive: bool = False
    has_zeros: bool = False
    """Whether some parameter has no gradient at this step, or one of exactly zero."""
    received: Flags = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """Parameters that have had a gradient at all."""
    started_at_zero: Flags = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """Parameters whose weight was zero at the first look: their relative updates mean nothing for a
    while.
    """
    repeats: int = 0
    """How many steps in a row had exactly the gradient of the step before."""
    uncleared: int = 0
    """How many steps in a row the optimizer used gradients that had not been cleared."""
    blocks: list[tuple[str, list[int]]] = field(default_factory=list)
    """Blocks of the model in its own order, with the rows of their matrices."""
    _block_rows: npt.NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    _block_of_row: npt.NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    ranks: RankLook | None = None
    """The newest comparison of ranks, which may be of a step before."""
    rank_looks: deque[RankLook] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    """The last comparisons over all parameters, of steps that were not left out and in which
    everything was finite.
    """
    rank_steps: deque[int] = field(default_factory=lambda: deque(maxlen=_RANK_LOOKS))
    """Such steps, with or without all parameters."""
    rank_logarithms: deque[Floats] = field(default_factory=lambda: deque(maxlen=_RANK_LOOKS))
    """At those steps: each rank's norm over the parameters that are looked at on every step."""
    left_out: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Steps that a GradScaler left out."""
    signals: set[str] = field(default_factory=set)
    """What has been seen so far."""

    def __post_init__(self) -> None:
        size = len(self.subject.names)
        self.alive, self.received, self.started_at_zero = (
            np.zeros(size, dtype=bool) for _ in range(3)
        )
        found: dict[str, list[int]] = {}
        for row in self.subject.matrices:
            if self.subject.trainable[row]:
                found.setdefault(block_of(self.subject.names[row]), []).append(row)
        self.blocks = list(found.items())
        self._block_rows = np.array([row for rows in found.values() for row in rows], dtype=np.intp)
        self._block_of_row = np.repeat(
            np.arange(len(found)), [len(rows) for rows in found.values()]
        )
        if self.subject.memberships is not None:
            self.signals.add("optimizer")

    def take(self, observed: Observed) -> None:
        """Make this the current step."""
        self.previous_total, self.now = self.now.total, observed
        step = observed.step
        if self.steps_seen == 0:
            self.first_step = step.step
        self.steps_seen += 1
        self._take_norms(observed)
        if observed.loss is not None:
            self._take_loss(observed.loss / (step.scale or 1.0))
        if step.clip_coef is not None:
            self.signals.add("clipping")
            self.clips.append(step.clip_coef)
        if step.scale is not None:
            self.signals.add("scale")
            self.scales.append((step.scale, step.skipped))
        if step.skipped:
            self.left_out.append(step.step)
        if observed.uncleared is not None:
            self.signals.add("clearing")
            self.uncleared = self.uncleared + 1 if observed.uncleared else 0
        if observed.alike is not None:
            self.signals.add("batches")
        if (
            observed.guess is not None
            and observed.loss is not None
            and len(self.starts) < 3
            and self.steps_seen <= 3
        ):
            self.signals.add("guess")
            self.starts.append((observed.loss, observed.guess))
        if observed.closer is not None:
            self._take_closer(observed.closer)

    def take_ranks(self, look: RankLook) -> None:
        """Make this the newest comparison of ranks."""
        self.signals.add("ranks")
        self.ranks = look
        if look.step not in self.left_out and np.isfinite(look.norms).all():
            if not look.always.all():
                self.rank_looks.append(look)
            self.rank_steps.append(look.step)
            self.rank_logarithms.append(
                np.log(np.maximum(np.linalg.norm(look.norms[:, look.always], axis=1), NOTHING))
            )

    def _take_norms(self, observed: Observed) -> None:
        self.previous = self.l2
        if observed.l2 is None:
            self.l2, self.effective = np.full(len(self.subject.names), np.nan), 0.0
            return
        self.signals.add("norms")
        if observed.rows is None:
            self.l2 = observed.l2
            if not self.all_alive:
                self.received[:] = True
        else:
            self.l2 = np.full(len(self.subject.names), np.nan)
            self.l2[observed.rows] = observed.l2
            self.received[observed.rows] = True
        self.has_zeros = not self.l2.min(initial=1.0) > 0  # a NaN is not above zero either
        self.logarithms = logarithms(
            self.l2, observed.total, not self.has_zeros and isfinite(observed.total)
        )
        if not self.all_alive:
            self.alive[slice(None) if observed.rows is None else observed.rows] |= observed.l2 != 0
            self.all_alive = bool(self.alive.all())
        same = 0 < observed.total == self.previous_total and np.array_equal(
            self.previous, self.l2, equal_nan=True
        )
        self.repeats = self.repeats + 1 if same else 0
        clip = observed.step.clip_coef
        self.effective = observed.total * clip if clip is not None else observed.total
        if observed.counts is None and isfinite(observed.total):
            self.totals.append(observed.total)

    def _take_loss(self, loss: float) -> None:
        if isfinite(loss):
            self.signals.add("loss")
            self.losses.append(loss)
            if len(self.first_losses) < 10:
                self.first_losses.append(loss)

    def _take_closer(self, closer: Closer) -> None:
        self.signals.add("closer")
        if self.looks_taken == 0:
            self.started_at_zero = np.isnan(closer.update_ratio)
        self.looks_taken += 1
        self.ever_updated |= bool((closer.update_ratio > 0).any())
        self.closers.append(closer)

    def block_norms(self) -> Floats:
        """The norm over the matrices of every block, now."""
        squares = np.nan_to_num(self.l2[self._block_rows]) ** 2
        return np.sqrt(np.bincount(self._block_of_row, squares, len(self.blocks)))

    @property
    def broken(self) -> bool:
        """Whether this step's gradient is not finite, and reached the optimizer."""
        return self.now.counts is not None and not self.now.step.skipped

    @property
    def converging(self) -> bool | None:
        """Whether the loss has come down to a tenth of where it began; None where no loss is known."""
        if len(self.first_losses) < 10 or len(self.losses) < 20:
            return None
        recent = list(self.losses)[-10:]
        return bool(np.median(recent) < 0.1 * np.median(self.first_losses[:5]))

    @property
    def at_rest(self) -> bool:
        """Whether the gradient has come down to a thousandth of its largest: a minimum, where
        nothing has to move any more.
        """
        return self.now.total < 1e-3 * max(self.totals, default=0.0)

    def named(self, rows: object) -> tuple[str, ...]:
        """The names of these rows."""
        return tuple(
            self.subject.names[int(row)] for row in np.atleast_1d(np.asarray(rows, dtype=np.intp))
        )

    def largest(self, most: int = 3) -> tuple[str, ...]:
        """The parameters that make up most of the gradient now."""
        order = np.argsort(np.where(np.isnan(self.l2), -1.0, self.l2))[::-1][:most]
        return self.named([row for row in order if self.l2[row] > 0])
