"""Knows a bad step when it comes, before the optimizer uses its gradient.

It asks the predicates that checks declare (`@check(..., alarm=...)`) with the settings of those
checks, on every rank alike: the judge's own word comes later, and on some ranks not at all.
"""

import math
from collections.abc import Sequence

from gradsight.health.bad_steps import EarlyLook, TotalHistory
from gradsight.health.registry import CheckSettings
from gradsight.measure.clipping import ClipReading
from gradsight.values.findings import Suspicion
from gradsight.values.measured import Norms

_SCALER_PATIENCE = 8
"""Overflows in a row that a GradScaler is trusted to settle by itself."""


class Alarm:
    """Takes the norms of step after step; says under which code the judge will find this one."""

    def __init__(self, checks: Sequence[CheckSettings], whole_norms: bool = True) -> None:
        """`checks`: those at work; one that is silenced raises no alarm.

        `whole_norms`: whether a look sees the whole gradient. The norms of several optimizers in
        turn tell nothing of spikes.
        """
        self._checks = [each for each in checks if each.check.incident.alarm is not None]
        self._whole_norms = whole_norms
        self._history = TotalHistory()
        self._bad_in_a_row = 0
        self._not_finite_raised = False  # in this stretch of steps that are not finite
        self._streaks: dict[str, int] = {}
        self._raised_in_step: set[str] = set()

    def not_finite(self, norms: Norms, scaler_settles: bool) -> str | None:
        """The code of the incident that this gradient begins, where it is not finite.

        `scaler_settles`: a GradScaler is at work and the loss is finite, so it will leave the step
        out and lower its scale. Only where that goes on and on is it an incident.
        """
        if norms.counts is None or self._not_finite_raised:
            return None
        # GradScaler starts at 2**16: a few overflows in a row are how it comes down to what fits.
        if scaler_settles and self._bad_in_a_row < _SCALER_PATIENCE:
            return None
        code = self._ask(self._look(norms, None))
        self._not_finite_raised = code is not None
        return code

    def too_large(self, norms: Norms, clip: ClipReading | None) -> str | None:
        """The code of the incident, where an optimizer is about to use far too large a gradient."""
        if norms.counts is not None or not math.isfinite(norms.total) or not self._whole_norms:
            return None
        return self._ask(self._look(norms, clip))

    def suspects(self, norms: Norms, scaler_settles: bool) -> Suspicion | None:
        """What the judge will find, where one look at the gradient tells; nothing is noted.

        So it may be asked at every look of a step: of accumulated gradients the last one counts.
        """
        if norms.counts is not None:
            settled = scaler_settles and self._bad_in_a_row < _SCALER_PATIENCE
            if self._not_finite_raised or settled:
                return None
        elif not math.isfinite(norms.total) or not self._whole_norms:
            return None
        look = self._look(norms, None)
        for each in self._checks:
            alarm = each.check.incident.alarm
            # A check with patience also wants to know what clipping leaves: not known yet.
            at_once = each.patience == 1 and each.check.code not in self._streaks
            if alarm is not None and at_once and alarm(look, **each.thresholds):
                return Suspicion(each.check.code, each.check.name, each.check.severity)
        return None

    def end_step(self, norms: Norms) -> None:
        """The step is made, with gradients of these norms."""
        finite = norms.counts is None and math.isfinite(norms.total)
        self._bad_in_a_row = 0 if finite else self._bad_in_a_row + 1
        if finite:
            self._not_finite_raised = False
        if self._streaks:
            self._end_streaks()
        self._history.add(norms.total, finite)

    def _end_streaks(self) -> None:
        for code in list(self._streaks):
            if code not in self._raised_in_step:
                del self._streaks[code]
        self._raised_in_step.clear()

    def _look(self, norms: Norms, clip: ClipReading | None) -> EarlyLook:
        return EarlyLook(norms, clip, self._history)

    def _ask(self, look: EarlyLook) -> str | None:
        """The first check whose patience is over at this step; once in a stretch of such steps."""
        # All of them are asked, though one alarm is enough: their streaks must go on.
        code = None
        for each in self._checks:
            alarm = each.check.incident.alarm
            if alarm is None or not alarm(look, **each.thresholds):
                continue
            known = self._streaks.get(each.check.code, 0)
            if each.check.code not in self._raised_in_step:
                self._raised_in_step.add(each.check.code)
                self._streaks[each.check.code] = known + 1
                if known + 1 == each.patience and code is None:
                    code = each.check.code
        return code
