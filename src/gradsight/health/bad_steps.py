"""What a bad step is: the one set of predicates that the judge's checks and the alarm both ask.

The judge asks when a step is complete, about every parameter; the alarm before the optimizer uses
the gradient, about its total alone. They used to be written twice, and drifted apart twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradsight.health.baseline import LENGTH, Baseline, logarithms
from gradsight.values.measured import Flags, Floats, Norms
from gradsight.values.scaling import SCALER_PATIENCE

if TYPE_CHECKING:  # checks can be read and explained without torch
    from torch import Tensor

    from gradsight.measure.clipping import ClipReading

NO_PARAMETERS = np.zeros(0)
"""The norms of a step of which only the total is known."""
STEPS_BEFORE_A_SPIKE = 15
"""How many steps there must be until one can be a spike: before, nothing is usual yet."""


def nan_rows(norms: Norms) -> Flags:
    """Which gradients hold a NaN, counted or not."""
    if norms.counts is None:
        return np.zeros(len(norms.l2), dtype=bool)
    return np.not_equal(norms.counts[0], 0)


def infinite_rows(norms: Norms) -> Flags:
    """Which gradients hold an infinity, counted or not."""
    if norms.counts is None:
        return np.zeros(len(norms.l2), dtype=bool)
    return np.not_equal(norms.counts[1], 0)


def is_nan_loss(loss: "Tensor | None") -> bool:
    """Whether a loss is NaN. It waits for the device: ask where the gradient is known to be bad."""
    return loss is not None and bool(loss.detach().isnan().any())


def scaler_settles(nan_loss: bool, bad_before: int) -> bool:
    """Whether a gradient that is not finite is a GradScaler's everyday life.

    It leaves the step out and lowers its scale. No scale makes a loss NaN, so that is a fault at
    once; an infinite one it may well make, in float16. `bad_before`: the steps in a row before
    this one that were not finite either.
    """
    # It starts at 2**16: a few overflows in a row are how it comes down to what fits.
    return not nan_loss and bad_before < SCALER_PATIENCE


def is_exploding(used_norm: float, limit: float) -> bool:
    """Whether the gradient that an optimizer uses, after clipping, is far too large."""
    return used_norm > limit


def is_sudden(norm: float, before: float, times: float) -> bool:
    """Whether a norm is not just so many times the one before, but jumped there; NaN counts."""
    return not norm < times * before


@dataclass(frozen=True, slots=True)
class Jump:
    """The norms of one step and of the step before: of every parameter, and of the whole."""

    l2: Floats
    total: float
    previous_l2: Floats
    previous_total: float
    steps_seen: int
    """How many steps there have been, this one included."""


def far_above(logarithms: Floats, baseline: Baseline, limits: Mapping[str, float]) -> Flags | None:
    """Which logarithms (last: the total's) are far above the usual; None where none is.

    `limits` are the settings of the spike's check; of these, factor and sigmas.
    """
    bound = baseline.bound(limits["factor"], limits["sigmas"], len(logarithms))
    if bound is None:
        return None
    high = logarithms > bound
    return high if high.any() else None


def spiking(
    jump: Jump, high: Flags, baseline: Baseline, limits: Mapping[str, float]
) -> Flags | None:
    """Which of the norms that are far above the usual are a spike; None where none can be.

    `limits` are the settings of the spike's check; of these, jump, total_factor and least.
    """
    usual = baseline.median
    if jump.steps_seen < STEPS_BEFORE_A_SPIKE or usual is None:
        return None
    # Noise around zero may jump as it likes.
    if not jump.total > limits["least"]:
        return None
    norms = np.append(jump.l2, jump.total)
    before = np.append(jump.previous_l2, jump.previous_total)
    with np.errstate(invalid="ignore"):
        high = high & ~(norms < limits["jump"] * before)
    # Where norms have long tails, as in reinforcement learning, a high one is usual.
    high &= norms > limits["jump"] * baseline.highest_total()
    # A parameter counts only where it alone exceeds the usual whole: one that wakes up is no fault.
    high &= norms > limits["total_factor"] * np.exp(usual[-1])
    return high


class TotalHistory:
    """The norms of the whole gradient so far, and what is usual for them."""

    def __init__(self) -> None:
        self.previous = 0.0
        """The step before's."""
        self.steps_seen = 0
        """How many steps have been made."""
        self._baseline = Baseline()
        self._not_entered: list[tuple[float, bool]] = []

    def add(self, total: float, finite: bool) -> None:
        """A step was made with a gradient of this norm."""
        self.previous = total
        self.steps_seen += 1
        # Entered in one go, and only when somebody asks: nobody does before the norm jumps, and a
        # single number costs numpy more here than all else that the alarm does.
        self._not_entered.append((total, finite))
        if len(self._not_entered) >= LENGTH:
            self._enter()

    @property
    def baseline(self) -> Baseline:
        """A baseline whose only column is the total."""
        self._enter()
        return self._baseline

    def _enter(self) -> None:
        for total, finite in self._not_entered:
            self._baseline.enter(logarithms(NO_PARAMETERS, total), finite)
        self._not_entered.clear()


@dataclass(frozen=True, slots=True)
class EarlyLook:
    """A gradient before the optimizer uses it, as far as it is known by then."""

    norms: Norms
    """Without a scaler's factor."""
    clip: "ClipReading | None"
    """How much of it the optimizer will use; None where it is not about to use it yet."""
    history: TotalHistory
    """Of the steps before."""

    @property
    def used_norm(self) -> float:
        """The norm that the optimizer is about to use. Reading the clip coefficient may wait."""
        coefficient = None if self.clip is None else self.clip.read()
        return self.norms.total * (coefficient or 1.0)
