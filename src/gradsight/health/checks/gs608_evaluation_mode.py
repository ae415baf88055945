"""GS608: evaluation mode while training."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS608",
    "evaluation mode while training",
    "warning",
    asked=Asked(when="passes", needs=("passes",)),
    advice=Advice(
        recommendation=(
            "Call model.train() before the training loop, and again after every validation. A "
            "part that is to stay in evaluation mode should not learn: requires_grad_(False)."
        ),
        fix="""
# in the loop, before the forward pass: training mode
model.train()
""",
    ),
)
def evaluating(window: Window) -> Iterator[Fact]:
    """Parts that learn are in evaluation mode.

    Why: dropout is off, and BatchNorm uses statistics that it no longer keeps up. Models that
    were loaded, and models that were just validated, are in that mode until somebody says
    otherwise. Frozen parts, and single layers that are kept so, are left alone.
    """
    passes = window.now.signals.passes
    parts = () if passes is None else passes.evaluating
    if parts:
        names = ", ".join(f"{name}: {off}" for name, off in parts[:3])
        yield Fact(f"step {window.step.step}, {names}", first_step=window.step.step)
