"""Counts the steps whose loss or gradient is not finite, for trainers that hide them."""

import math
from collections.abc import Mapping, Sequence

from gradsight.core.notices import notice
from gradsight.health.bad_steps import infinite_rows, nan_rows, scaler_settles
from gradsight.values.findings import Finding
from gradsight.values.health_report import Abstention
from gradsight.values.measured import MeasuredStep

_NAN = "GS103"
_INFINITE = "GS104"


class BrokenSteps:
    """An output of the line: how many steps were broken so far, and one line at the first.

    What a GradScaler leaves out on its way to its scale is no fault, and not counted.
    """

    title = "the count of broken steps"

    def __init__(self, quiet: bool) -> None:
        self.count = 0
        self._quiet = quiet
        self._overflows = 0  # in a row
        self._something_was_said = False

    def write(self, measured: MeasuredStep, findings: Sequence[Finding]) -> None:
        """One step, and every finding that is new or has changed."""
        critical = {finding.code for finding in findings if finding.severity == "critical"}
        code = self._code(measured)
        if code is not None:
            self.count += 1
            # The watch itself says its first critical finding, and with its cause.
            is_said = code in critical and not self._something_was_said
            if self.count == 1 and not is_said and not self._quiet:
                notice(_line(measured, code))
        self._something_was_said |= bool(critical)

    def finish(self, findings: Sequence[Finding], abstained: Sequence[Abstention]) -> None:
        """The run is over."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars are not counted."""

    def log_scalar(self, step: int, name: str, value: float) -> None:
        """Scalars are not counted."""

    def log_tracked(self, step: int, name: str, value: float) -> None:
        """Scalars are not counted."""

    def _code(self, measured: MeasuredStep) -> str | None:
        """What is wrong with a step, as the checks call it; None for a sound one."""
        step = measured.step
        loss = 0.0 if step.loss is None else step.loss
        code = None
        if math.isnan(loss):
            code = _NAN
        elif math.isinf(loss):
            code = _INFINITE
        if measured.norms is not None and infinite_rows(measured.norms).any():
            code = _INFINITE
        if measured.norms is not None and nan_rows(measured.norms).any():
            code = _NAN
        if code is None:
            self._overflows = 0
            return None
        if step.scale is not None and step.skipped:
            self._overflows += 1
            if scaler_settles(math.isnan(loss), self._overflows - 1):
                return None
        return code


def _line(measured: MeasuredStep, code: str) -> str:
    step = measured.step
    what = "the loss is"
    value = step.loss
    if value is None or math.isfinite(value):
        what = "the norm of the gradient is"
        value = step.total_norm
    return f"step {step.step}: {code} {what} {value}; the trainer's own log may not show it"
