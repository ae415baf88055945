"""Knows a bad step when it comes, before the optimizer uses its gradient, by the judge's
thresholds; on every rank alike.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradsight.health.usual import Usual
from gradsight.measure.norms import Norms

NAN, INF, SPIKE, EXPLODING = "GS103", "GS104", "GS201", "GS102"
_SCALER_PATIENCE = 8
"""Overflows in a row that a GradScaler is trusted to settle by itself."""
_STEPS_BEFORE_A_SPIKE = 11


class Alarm:
    """Takes the norms of step after step; tells under which code the judge will find the one under
    way.
    """

    def __init__(self, limits: Mapping[str, Mapping[str, Any]]) -> None:
        """`limits`: the thresholds of the checks by code; one that is silenced raises no alarm."""
        self._limits = limits
        self._usual = Usual()
        self._steps, self._previous = 0, 0.0
        self._bad_in_a_row = self._large_in_a_row = 0
        self._raised = False  # in this stretch of steps that are not finite

    def not_finite(
        self, norms: Norms, scaler: torch.amp.GradScaler | None, loss: Tensor | None
    ) -> str | None:
        """A gradient has been looked at: the code if it begins an incident. What a GradScaler will
        settle by itself is none.
        """
        if norms.counts is None or self._raised:
            return None
        scaled = scaler is not None and (loss is None or bool(torch.isfinite(loss.detach()).all()))
        if scaled and self._bad_in_a_row < _SCALER_PATIENCE:
            return None
        code = NAN if norms.counts[0].any() else INF
        self._raised = code in self._limits
        return code if self._raised else None

    def too_large(self, total: float, clip_coef: Callable[[], float | None]) -> str | None:
        """An optimizer is about to use a gradient of this norm: the code if that is too large, or a
        spike.
        """
        exploding, spike = self._limits.get(EXPLODING), self._limits.get(SPIKE)
        if (
            exploding is not None
            and total > exploding["limit"]
            and total * (clip_coef() or 1.0) > exploding["limit"]
        ):
            self._large_in_a_row += 1
            if self._large_in_a_row == exploding["patience"]:
                return EXPLODING
        else:
            self._large_in_a_row = 0
        return SPIKE if spike is not None and self._is_spike(total, spike) else None

    def end_step(self, finite: bool, total: float) -> None:
        """The step is made, with a gradient of this norm."""
        self._bad_in_a_row = 0 if finite else self._bad_in_a_row + 1
        self._raised &= not finite
        if finite:
            self._steps += 1
            self._previous = total
            self._usual.enter(_logarithm(total))

    def _is_spike(self, total: float, limits: Mapping[str, float]) -> bool:
        enough = (
            self._steps >= _STEPS_BEFORE_A_SPIKE
            and total > limits["least"]
            and total >= limits["jump"] * self._previous
        )
        excess = self._usual.excess(_logarithm(total)) if enough else None
        return (
            excess is not None
            and excess[0] > math.log(limits["factor"])
            and excess[1] > limits["sigmas"]
        )


def _logarithm(total: float) -> float:
    return math.log(max(total, 1e-40))
