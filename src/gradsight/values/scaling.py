"""Whether a GradScaler that leaves steps out is at its everyday work, in words. No torch."""

from collections.abc import Iterable, Sequence

from gradsight.values.findings import Finding

SCALER_PATIENCE = 8
"""Overflows in a row that a GradScaler is trusted to settle by itself."""
_NOT_HARMLESS = {"GS103", "GS104", "GS404"}


def scaler_note(left_out: Sequence[int], last_step: int, findings: Iterable[Finding]) -> str | None:
    """What to tell who asks whether a NaN in the log is normal.

    `left_out`: the steps that a GradScaler left out, in order. None where there are none, or where
    a finding says that it is not harmless.

    >>> scaler_note([0, 1], 9, []).partition(", ")[2]
    'harmless until step 2 (2 left out)'
    """
    if not left_out or any(finding.code in _NOT_HARMLESS for finding in findings):
        return None
    until = left_out[-1] + 1
    if last_step == left_out[-1]:
        # It is not over yet: from there on it would be a finding.
        until = _begin_of_last_stretch(left_out) + SCALER_PATIENCE
    return (
        "the loss scaler is finding its scale: no weight was changed, "
        f"harmless until step {until} ({len(left_out)} left out)"
    )


def _begin_of_last_stretch(steps: Sequence[int]) -> int:
    begin = steps[-1]
    for step in reversed(steps[:-1]):
        if step != begin - 1:
            break
        begin = step
    return begin
