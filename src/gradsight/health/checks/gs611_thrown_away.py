"""GS611: gradients that are thrown away."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS611",
    "gradients thrown away",
    "warning",
    asked=Asked(when="passes", needs=("passes",)),
    advice=Advice(
        recommendation=(
            "Gradients are cleared before any optimizer has used them, so their data is not "
            "learned from: clear after the optimizer has stepped, and nowhere else."
        ),
        fix="""
# instead of the loop: clear the gradients after the optimizer's step
for number, (inputs, targets) in enumerate(loader):
    # 2: the number of batches per step
    loss = loss_fn(model(inputs), targets) / 2
    loss.backward()
    if (number + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
)
def thrown_away(window: Window) -> Iterator[Fact]:
    """Gradients are cleared before an optimizer has used them.

    Why: the batches behind them are computed and never learned from. What another optimizer has
    used (a discriminator's gradient of the generator's loss) is thrown away on purpose.
    """
    passes = window.now.signals.passes
    if passes is None or passes.thrown_away is None:
        return
    times, place = passes.thrown_away
    where = f" at {place}" if place else ""
    yield Fact(f"passes cleared before any optimizer had used them: {times}, of backward{where}")
