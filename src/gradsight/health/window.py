"""What a check may look at.

The step just made, what came before it, and what is known of the model.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan

import numpy as np

from gradsight.health.bad_steps import scaler_settles
from gradsight.health.baseline import Baseline, logarithms
from gradsight.health.expert_life import ExpertLife
from gradsight.health.trainers import Trainer
from gradsight.values.endings import LossAtEnd
from gradsight.values.experts import ExpertGroup
from gradsight.values.first_step import ConstantLoss
from gradsight.values.measured import (
    Details,
    Flags,
    Floats,
    MeasuredStep,
    Norms,
    RankComparison,
    RankDigests,
    Rows,
)
from gradsight.values.networks import UnmovedNetwork
from gradsight.values.steps import Step, block_of

_KEPT = 400
"""Steps of history that trends are read from."""
_RANK_LOOKS = 60
NOTHING = 1e-40
"""Stands for a norm of zero where logarithms are compared."""
NO_LEARNING_RATE = 1.01e-3
"""Below this part of its highest value a learning rate is dead; three divisions by ten reach it."""
_LOOKS = 4
"""Closer looks that are remembered."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What one group of an optimizer does to its parameters, as of the last closer look."""

    optimizer: str
    """The class of the optimizer, and which of several it is."""
    lr: float
    shrinks: float = 0.0
    """The part of every weight that weight decay takes away per step.

    0 where the decay is an ordinary one: if that takes much, the learning rate is to blame.
    """


@dataclass(frozen=True, slots=True)
class OnlyOptimizer:
    """The optimizer of a run that has one, for advice that names it."""

    name: str
    is_scheduled: bool = False
    usual_rate: float = 1e-3
    """The learning rate that its class has by default."""
    call: str | None = None
    """Code that makes it again, with {given} for the parameters and {lr}; None: it is unknown."""


@dataclass(frozen=True, slots=True)
class SeveralOptimizers:
    """The optimizers of a run that has more than one, for advice."""

    call: str | None = None
    """Code that makes one like the last of them, with {given} for the parameters."""
    held_twice: tuple[int, ...] = ()
    """Parameters of two optimizers that hold exactly the same parameters, by position."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is known of the model and its optimizers before any gradient is seen.

    Lists are over the parameters.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    trainable: list[bool]
    kinds: list[str]
    """The class of the module that owns the parameter."""
    half: list[bool]
    """Whether its values are float16."""
    lost_eps: float | None = None
    """The eps of an optimizer, where it is 0 in the type of the parameters that it holds."""
    groups: tuple[GroupSettings, ...] = ()
    """The groups of all optimizers."""
    group_of: tuple[int | None, ...] = ()
    """The group of every parameter; empty where no optimizer is known."""
    normalising: bool = False
    """Whether every optimizer divides the gradient's size away, as Adam does."""
    memberships: list[int] | None = None
    """How often an optimizer was given the parameter; None where no optimizer is known."""
    experts: tuple[ExpertGroup, ...] = ()
    """Experts that stand side by side."""
    optimizer: OnlyOptimizer | None = None
    """None where there are several, or none is known."""
    several: SeveralOptimizers | None = None
    """None where there is one, or none is known."""
    trainer: Trainer | None = None
    """What runs the loop; None for a loop of the user's."""
    frozen_adapters: tuple[int, ...] = ()
    """Adapters that are frozen while other parts of their model are trained."""
    is_pretrained: bool = False
    """Whether the weights were loaded, as far as that can be seen."""

    @property
    def matrices(self) -> list[int]:
        """Parameters that mix features: two or more dimensions, and not a lookup table."""
        return [
            row
            for row, (shape, kind) in enumerate(zip(self.shapes, self.kinds, strict=True))
            if len(shape) >= 2 and "embedding" not in kind.lower()
        ]


@dataclass(slots=True)
class Window:
    """The current step and its past. Only finite norms are in `totals` and in the baseline."""

    subject: Subject
    now: MeasuredStep = field(default_factory=lambda: MeasuredStep(Step(0, 0.0)))
    """The step just made; the next five are its own, for every check asks for them."""
    step: Step = field(default_factory=lambda: Step(0, 0.0))
    norms: Norms | None = None
    """The norms of its gradients; None where none were measured."""
    last_look: MeasuredStep | None = None
    """The newest step whose gradients were measured: this one, or one before it."""
    total: float = 0.0
    """The norm of its whole gradient; 0 where none was measured."""
    finite: bool = True
    """Whether none of its gradients holds a NaN or an infinity."""
    loss: float | None = None
    """Its loss, where one was seen."""
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
    first_block_norms: Floats | None = None
    """`block_norms` of the first step whose gradients were measured and finite."""
    first_totals: list[float] = field(default_factory=list)
    """The norms of the first few steps."""
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    first_losses: list[float] = field(default_factory=list)
    starts: list[tuple[float, float]] = field(default_factory=list)
    """Of the first three steps: the loss, and what it would be if the model knew nothing."""
    clips: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    scales: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Loss scale, and whether the step was left out."""
    details: deque[Details] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    details_taken: int = 0
    experts: dict[str, ExpertLife] = field(default_factory=dict)
    """By group of experts: which of them got a gradient lately."""
    start_rms: Floats = field(default_factory=lambda: np.zeros(0))
    """The weights' root mean squares at the first closer look."""
    peaks: Floats | None = None
    """The largest that each parameter's usual logarithm has been; None during warm-up."""
    highest_lr: float = 0.0
    steps_of_no_lr: int = 0
    """How many steps in a row the learning rate was next to nothing, after it had been more."""
    new_rates_from: int | None = None
    """The first step of an optimizer that took the place of all others."""
    unigram: float | None = None
    """The loss of a model that knows how frequent each target is, and nothing else."""
    ever_updated: bool = False
    """Whether any closer look found that a step had changed a weight."""
    alive: Flags = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """Parameters that have had a gradient other than zero."""
    all_alive: bool = False
    has_zeros: bool = False
    """Whether some parameter has no gradient at this step, or one of exactly zero."""
    received: Flags = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """Parameters that have had a gradient at all."""
    reached: Flags = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """Parameters whose gradient a backward pass has written, whatever became of it."""
    started_at_zero: Flags = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """Parameters whose weight was zero at the first look.

    Their relative updates mean nothing for a while.
    """
    rows_outside: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    """Parameters in no optimizer that had a gradient when some last had one."""
    looks_outside: int = 0
    """How many detailed measurements found such parameters."""
    unmoved: tuple[UnmovedNetwork, ...] = ()
    """Networks of the script that get gradients and that no optimizer moves."""
    at_end: LossAtEnd | None = None
    """The loss that the script failed on, if it was not finite."""
    broken_losses: int = 0
    """How many losses in a row were not finite, at steps whose gradient was."""
    pass_counts: set[int] = field(default_factory=set)
    """How many backward passes have made the gradients of the steps that were looked at."""
    updated_twice: set[int] = field(default_factory=set)
    """Parameters that two optimizers have updated by the same gradient."""
    held_in_vain: set[int] = field(default_factory=set)
    """Parameters that two optimizers hold, one of which has never found a gradient."""
    repeats: int = 0
    """How many steps in a row had exactly the gradient of the step before."""
    digests: RankDigests | None = None
    """The last comparison of ranks by checksum."""
    identical_batches: int = 0
    """Compared steps at which all ranks were given the same batch."""
    uncleared: int = 0
    """How many steps in a row the optimizer used gradients that had not been cleared."""
    is_one_of_several: bool = False
    """Whether other models are watched too; only set if gradients were not cleared."""
    blocks: list[tuple[str, list[int]]] = field(default_factory=list)
    """Blocks of the model in its own order, with the rows of their matrices."""
    _block_rows: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    _block_of_row: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    ranks: RankComparison | None = None
    """The newest comparison of ranks, which may be of a step before."""
    rank_looks: deque[RankComparison] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    """The last comparisons over all parameters, of steps that were not left out and in which
    everything was finite.
    """
    rank_steps: deque[int] = field(default_factory=lambda: deque(maxlen=_RANK_LOOKS))
    """Such steps, with or without all parameters."""
    rank_logarithms: deque[Floats] = field(default_factory=lambda: deque(maxlen=_RANK_LOOKS))
    """At those steps: each rank's norm over the parameters that are looked at on every step."""
    bad_before: int = 0
    """How many steps in a row before this one were not finite."""
    left_out: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Steps that a GradScaler left out."""
    cut_by_checkpoint: bool = False
    """Whether reentrant checkpointing was given inputs that need no gradient."""
    input_ignored: bool = False
    """Whether the model's output did not depend on its input at the first step."""
    dead_layer: str = ""
    """The layer whose units were all dead then, by its name in the module that was called."""
    dead_shares: dict[int, float] = field(default_factory=dict)
    """By weight in which most units have been dead: their share, as last measured."""
    label_share: float | None = None
    unlabelled: bool = False
    """Whether the first step had no label that counts."""
    masked: bool = False
    """Whether most labels of the first step do not count, as where masked words are learned."""
    constant: ConstantLoss | None = None
    """What makes the gradient of a loss of the first step zero, where that is known."""
    not_judged: tuple[tuple[str, str], ...] = ()
    """Codes that the first step could not be judged by, each with the reason."""
    unseen: dict[str, str] = field(default_factory=dict)
    """Why a signal does not come in this run, where that is known better than by `MISSING`."""
    signals: set[str] = field(default_factory=set)
    """What has been seen so far."""

    def __post_init__(self) -> None:
        size = len(self.subject.names)
        self.alive = np.zeros(size, dtype=bool)
        self.received = np.zeros(size, dtype=bool)
        self.reached = np.zeros(size, dtype=bool)
        self.started_at_zero = np.zeros(size, dtype=bool)
        blocks: dict[str, list[int]] = {}
        for row in self.subject.matrices:
            if self.subject.trainable[row]:
                blocks.setdefault(block_of(self.subject.names[row]), []).append(row)
        self.blocks = list(blocks.items())
        self._block_rows = np.array(
            [row for rows in blocks.values() for row in rows], dtype=np.intp
        )
        self._block_of_row = np.repeat(
            np.arange(len(blocks)), [len(rows) for rows in blocks.values()]
        )
        if self.subject.memberships is not None:
            self.signals.add("optimizer")

    # Taking in.

    def take(self, measured: MeasuredStep) -> None:
        """Make this the current step."""
        self.previous_total = self.total
        self.now = measured
        self.step = measured.step
        self.norms = measured.norms
        self.total = 0.0 if measured.norms is None else measured.norms.total
        self.bad_before = 0 if self.finite else self.bad_before + 1
        self.finite = measured.finite
        self.loss = measured.signals.loss
        if self.steps_seen == 0:
            self.first_step = self.step.step
        self.steps_seen += 1
        self._take_norms()
        if self.first_block_norms is None and self.finite and self.norms is not None:
            self.first_block_norms = self.block_norms()
        self._take_scaling()
        self._take_signals()
        for name, norms in measured.experts.items():
            self.experts.setdefault(name, ExpertLife()).take(self.step.step, norms)
        if measured.details is not None:
            self._take_details(measured.details)

    def take_ranks(self, comparison: RankComparison) -> None:
        """Make this the newest comparison of ranks."""
        self.signals.add("ranks")
        self.ranks = comparison
        norms = comparison.norms
        if comparison.step in self.left_out or not np.isfinite(norms).all():
            return
        if not comparison.always.all():
            self.rank_looks.append(comparison)
        # Over the same parameters at every step: other rows would make a jump of their own.
        whole = np.linalg.norm(norms[:, comparison.always], axis=1)
        self.rank_steps.append(comparison.step)
        self.rank_logarithms.append(np.log(np.maximum(whole, NOTHING)))

    def _take_norms(self) -> None:
        self.previous = self.l2
        norms = self.norms
        if norms is None:
            self.l2 = np.full(len(self.subject.names), np.nan)
            self.effective = 0.0
            return
        self.last_look = self.now
        self.signals.add("norms")
        rows = slice(None) if self.now.rows is None else list(self.now.rows)
        if self.now.rows is None:
            self.l2 = norms.l2
        else:
            self.l2 = np.full(len(self.subject.names), np.nan)
            self.l2[rows] = norms.l2
        self.has_zeros = not self.l2.min(initial=1.0) > 0  # a NaN is not above zero either
        ordinary = not self.has_zeros and isfinite(norms.total)
        self.logarithms = logarithms(self.l2, norms.total, ordinary)
        if not self.all_alive:
            self.received[rows] = True
            # Not `> 0`: a NaN is a gradient too, and its parameter is not cut off.
            self.alive[rows] |= norms.l2 != 0
            self.all_alive = bool(self.alive.all())
        # The total is compared first: it differs on nearly every step, and costs nothing.
        same_total = 0 < norms.total == self.previous_total
        same = same_total and np.array_equal(self.previous, self.l2, equal_nan=True)
        self.repeats = self.repeats + 1 if same else 0
        self.effective = norms.total
        if self.step.clip_coef is not None:
            self.effective *= self.step.clip_coef
        # One NaN in a running mean hides what follows: OLMo-core's spike rule misses a norm of 1e6
        # for a whole window behind it.
        if self.finite and isfinite(norms.total):
            self.totals.append(norms.total)
            if len(self.first_totals) < 3:
                self.first_totals.append(norms.total)

    def _take_scaling(self) -> None:
        step = self.step
        if step.clip_coef is not None:
            self.signals.add("clipping")
            self.clips.append(step.clip_coef)
        if step.scale is not None:
            self.signals.add("scale")
            self.scales.append((step.scale, step.skipped))
        if step.skipped:
            self.left_out.append(step.step)

    def take_networks(self, networks: Sequence[UnmovedNetwork]) -> None:
        """All networks of the script were compared with its optimizers; these are unmoved."""
        self.signals.add("networks")
        self.unmoved = tuple(networks)

    def take_digests(self, digests: RankDigests) -> None:
        """A comparison of ranks by checksum has arrived."""
        self.signals.add("rank digests")
        self.digests = digests

    def _take_signals(self) -> None:
        signals = self.now.signals
        self.unseen.update(signals.unseen)
        if signals.loss is not None:
            # Backward is called on the loss times the GradScaler's factor.
            self._take_loss(signals.loss / (self.step.scale or 1.0))
        if signals.unigram is not None and isfinite(signals.unigram):
            self.unigram = signals.unigram
            self.signals.add("unigram")
        self._take_learning_rate()
        if signals.reached:
            self.reached[list(signals.reached)] = True
        self.updated_twice.update(signals.updated_twice)
        self.held_in_vain.update(signals.held_in_vain)
        if signals.uncleared is not None:
            self.signals.add("clearing")
            self.uncleared = self.uncleared + 1 if signals.uncleared else 0
            self.is_one_of_several |= signals.is_one_of_several
        if signals.alike_batches is not None:
            self.signals.add("batches")
        if signals.first is not None:
            self.signals.add("first step")
            self.not_judged = (*self.not_judged, *signals.first.left_out)
            self.input_ignored = signals.first.depends is False
            self.dead_layer = signals.first.dead_layer
            self.constant = signals.first.constant
            self.label_share = signals.first.label_share
            labels = signals.first.labels
            counted = sum(each.counted for each in labels)
            self.unlabelled = bool(labels) and not counted
            self.masked = 2 * counted < sum(each.labels for each in labels)
        if signals.passes is not None:
            self.signals.add("passes")
            self.cut_by_checkpoint |= signals.passes.cut_by_checkpoint
            self.pass_counts.add(signals.passes.count)
            why_not = signals.passes.why_not_repeated
            if why_not is not None and ("GS609", why_not) not in self.not_judged:
                self.not_judged += (("GS609", why_not),)
        if signals.guess is not None and signals.loss is not None and self.steps_seen <= 3:
            self.signals.add("guess")
            self.starts.append((signals.loss, signals.guess))

    def _take_learning_rate(self) -> None:
        lr = self.step.lr
        if lr is None:
            return
        self.signals.add("lr")
        if self.new_rates_from is not None and self.step.step >= self.new_rates_from:
            self.new_rates_from = None
            self.highest_lr = 0.0
        self.highest_lr = max(self.highest_lr, lr)
        is_nothing = lr <= NO_LEARNING_RATE * self.highest_lr and self.highest_lr > 0
        self.steps_of_no_lr = self.steps_of_no_lr + 1 if is_nothing else 0

    def take_baseline(self) -> None:
        """The step was entered into the baseline: remember how high each parameter has been."""
        median = self.baseline.median
        if median is None:
            return
        if self.peaks is None or len(self.peaks) != len(median):
            self.peaks = median.copy()
        else:
            np.maximum(self.peaks, median, out=self.peaks)

    def _take_loss(self, loss: float) -> None:
        if not isfinite(loss):
            self.broken_losses += self.finite
        else:
            self.broken_losses = 0
            self.unlabelled = False
            self.signals.add("loss")
            self.losses.append(loss)
            if len(self.first_losses) < 10:
                self.first_losses.append(loss)

    def _take_details(self, details: Details) -> None:
        self.signals.add("details")
        ratios = details["update_ratio"]
        if self.details_taken == 0:
            self.started_at_zero = np.isnan(ratios)
            self.start_rms = details["weight_rms"]
        self.details_taken += 1
        self.ever_updated |= bool((ratios > 0).any())
        self.details.append(details)

    def block_norms(self) -> Floats:
        """The norm over the matrices of every block, now."""
        norms = np.nan_to_num(self.l2[self._block_rows])
        # Squares of very large norms would overflow.
        largest = norms.max(initial=0.0) or 1.0
        squares = np.bincount(self._block_of_row, (norms / largest) ** 2, len(self.blocks))
        found: Floats = largest * np.sqrt(squares)
        return found

    @property
    def rate(self) -> float | None:
        """The largest learning rate of this step; None where none is known."""
        rates = [rate for name, rate in self.step.scalars.items() if name.startswith("lr/")]
        if self.step.lr is not None:
            rates.append(self.step.lr)
        return max(rates, default=None)

    @property
    def at_rate(self) -> str:
        """The learning rate of this step, to be added to evidence."""
        if self.rate is None:
            return ""
        optimizer = self.subject.optimizer
        of = "" if optimizer is None else f" ({optimizer.name})"
        return f", at a learning rate of {self.rate:.3g}{of}"

    @property
    def broken(self) -> bool:
        """Whether this step's gradient is not finite, and a GradScaler has not settled it."""
        if self.finite:
            return False
        # Without a scale it was left out because the user asked for it: there is a fault to tell.
        if not self.step.skipped or self.step.scale is None:
            return True
        nan_loss = self.loss is not None and isnan(self.loss)
        return not scaler_settles(nan_loss, self.bad_before)

    @property
    def clips_already(self) -> bool:
        """Whether the optimizer was lately given less than the gradient."""
        return min(self.clips, default=1.0) < 1.0

    @property
    def converging(self) -> bool | None:
        """Whether the loss is down to a tenth of where it began; None where no loss is known."""
        if len(self.first_losses) < 10 or len(self.losses) < 20:
            return None
        recent = list(self.losses)[-10:]
        return bool(np.median(recent) < 0.1 * np.median(self.first_losses[:5]))

    @property
    def at_rest(self) -> bool:
        """Whether the gradient has come down to a thousandth of its largest.

        A minimum, where nothing has to move any more.
        """
        # A full-batch problem soon gets there, and from then on repeats its gradient as it should.
        return self.total < 1e-3 * max(self.totals, default=0.0)

    def named(self, rows: object) -> tuple[str, ...]:
        """The names of these rows."""
        return tuple(
            self.subject.names[int(row)] for row in np.atleast_1d(np.asarray(rows, dtype=np.intp))
        )

    def largest(self, most: int = 3) -> tuple[str, ...]:
        """The parameters that make up most of the gradient now."""
        order = np.argsort(np.where(np.isnan(self.l2), -1.0, self.l2))[::-1][:most]
        return self.named([row for row in order if self.l2[row] > 0])
