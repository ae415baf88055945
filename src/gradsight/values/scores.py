"""What one training sample does for a target. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampleScore:
    """<direction, g_i> of one training sample at one step. Positive helps the target."""

    step: int
    sample_id: int | str
    domain: str | None
    target: str
    score: float
    lr: float | None
    clip_coef: float | None
