"""GS105: a small gradient."""

from collections.abc import Iterator

from gradsight.judge.registry import Fact, check
from gradsight.judge.window import Window


@check(
    "GS105",
    "small gradient",
    "warning",
    recommendation=(
        "Check the architecture (saturating activations, missing skip connections or normalisation) and the "
        "initialisation; look for frozen parameters."
    ),
    fix="""
# is something frozen?
for name, parameter in model.named_parameters():
    if not parameter.requires_grad:
        print(f"Frozen: {name}")

# an initialisation that keeps the signal's size
def init_weights(module):
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)

model.apply(init_weights)
""",
)
def small(window: Window, *, limit: float = 0.001, patience: int = 10) -> Iterator[Fact]:
    """The gradient is small from the start: it may be vanishing.

    Why: next to nothing reaches the weights. A gradient that becomes small later is the business of the trend checks.
    """
    if 0 < window.now.total < limit and window.now.counts is None and window.steps_seen <= 2 * patience:
        yield Fact(f"norm {window.now.total:.3g}, limit {limit:g}")
