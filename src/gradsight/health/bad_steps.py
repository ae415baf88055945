"""What a bad step is: the one set of predicates that the judge's checks and the alarm both ask.

The judge asks when a step is complete, about every parameter; the alarm before the optimizer uses
the gradient, about its total alone. They used to be written twice, and drifted apart twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradsight.health.baseline import Baseline
from gradsight.values.measured import Flags, Floats, Norms

if TYPE_CHECKING:  # checks can be read and explained without torch
    from gradsight.measure.clipping import ClipReading

STEPS_BEFORE_A_SPIKE = 12
"""The first step that can be a spike: before it nothing is usual yet."""


def nan_rows(norms: Norms) -> Flags:
    """Which gradients hold a NaN; one that is known to be broken, but was not counted, is one."""
    if norms.counts is None:
        return np.zeros(len(norms.l2), dtype=bool)
    return np.not_equal(norms.counts[0], 0)


def infinite_rows(norms: Norms) -> Flags:
    """Which gradients hold an infinity."""
    if norms.counts is None:
        return np.zeros(len(norms.l2), dtype=bool)
    return norms.counts[1] > 0


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
    logarithms: Floats
    """Of the norms and, last, of the total."""
    steps_seen: int
    """How many steps there have been, this one included."""


def spiking(jump: Jump, baseline: Baseline, limits: Mapping[str, float]) -> Flags | None:
    """Which of the norms (last: the total) are a spike; None where nothing is high.

    `limits` are the settings of the spike's check: factor, sigmas, jump, share, least.
    """
    usual = baseline.median
    if jump.steps_seen < STEPS_BEFORE_A_SPIKE or usual is None:
        return None
    # Noise around zero may jump as it likes.
    if not jump.total > limits["least"]:
        return None
    bound = baseline.bound(limits["factor"], limits["sigmas"], len(jump.logarithms))
    if bound is None:
        return None
    high = jump.logarithms > bound
    if not high.any():
        return None
    norms = np.append(jump.l2, jump.total)
    before = np.append(jump.previous_l2, jump.previous_total)
    with np.errstate(invalid="ignore"):
        high &= ~(norms < limits["jump"] * before)
    # A parameter counts only where it alone exceeds the usual whole: one that wakes up is no fault.
    high &= norms > limits["share"] * np.exp(usual[-1])
    return high


@dataclass(frozen=True, slots=True)
class EarlyLook:
    """A gradient before the optimizer uses it, as far as it is known by then."""

    norms: Norms
    """Without a scaler's factor."""
    clip: "ClipReading | None"
    """How much of it the optimizer will use; None where it is not about to use it yet."""
    previous_total: float
    steps_seen: int
    """How many steps there have been, this one included."""
    baseline: Baseline

    @property
    def used_norm(self) -> float:
        """The norm that the optimizer is about to use. Reading the clip coefficient may wait."""
        coefficient = None if self.clip is None else self.clip.read()
        return self.norms.total * (coefficient or 1.0)
