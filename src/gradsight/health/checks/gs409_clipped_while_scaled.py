"""GS409: clipping before the gradients are unscaled."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS409",
    "clipping before unscale_",
    "warning",
    asked=Asked(needs=("scale",)),
    advice=Advice(
        recommendation=(
            "The gradients still carry the GradScaler's factor when they are clipped. Call "
            "scaler.unscale_(optimizer) first; scaler.step() then knows that it was called. "
            "accelerate's clip_grad_norm_ does both."
        ),
        fix="""
# in the loop, instead of the line that clips: unscale first
scaler.unscale_(optimizer)
torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
""",
    ),
)
def clipped_while_scaled(
    window: Window, *, factor: float = 100.0, coefficient: float = 0.02
) -> Iterator[Fact]:
    """Gradients are clipped while the GradScaler's factor is still in them.

    Why: with a scale of 65536, a limit of 1 is a limit of 1/65536 for the gradient itself, so
    nearly every step becomes tiny. Adam hides that in part. Other optimizers hardly move, so for
    them the finding is critical if less than `coefficient` of the gradient is left. A limit that
    you multiplied by the scale is right: limits above the scale divided by `factor` are accepted.
    """
    limit = window.now.signals.scaled_limit
    scale = window.step.scale
    left = window.step.clip_coef
    if limit is None or scale is None or limit * factor >= scale or left == 1:
        return
    evidence = (
        f"clipped to {limit:g} when the gradient carried a factor of {scale:g}: a limit of "
        f"{limit / scale:.2g} for the gradient itself"
    )
    severity = None
    if left is not None:
        evidence += f"; {left:.2g} of the gradient was left for the optimizer"
        if left < coefficient and not window.subject.normalising:
            severity = "critical"
    yield Fact(evidence, severity=severity)
