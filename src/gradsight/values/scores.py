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
    # With these two a score is a change of the loss: -lr * clip_coef * score, to first order.
    lr: float | None
    clip_coef: float | None


@dataclass(frozen=True, slots=True)
class SavedScore(SampleScore):
    """A sample's score with the columns that only some score files have."""

    by_parameter: tuple[float | None, ...] | None
    """Each parameter's part of the score, in the order that the file names; None where frozen."""
    direction: str
    """ "plain", or "adam" where the direction was scaled by the optimizer's second moments."""
