"""GS606: no label that counts."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS606",
    "no label counts",
    "critical",
    asked=Asked(when="first", needs=("first step",)),
    advice=Advice(
        recommendation=(
            "Every label is the one that the loss ignores, so it divides zero by zero: look "
            "at how labels are made and padded, at ignore_index, and at what a template "
            "masks."
        ),
        fix="""
# instead of the loop: leave out batches without a label that counts
# (-100 is the ignore_index of the loss)
for inputs, targets in loader:
    if (targets != -100).any():
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
""",
    ),
)
def no_label(window: Window) -> Iterator[Fact]:
    """All labels of a batch are ignored, so the loss is nothing divided by nothing.

    Why: the loss is NaN while gradients are zero, which looks like a dead model or a broken
    scaler.
    """
    first = window.now.signals.first
    labels = () if first is None else first.labels
    if not labels:
        return
    empty = [each for each in labels if each.labels and not each.counted]
    is_mean = any(each.is_mean for each in empty)
    if empty and (is_mean or len(empty) == len(labels)):
        each = empty[0]
        where = f" at {each.place}" if each.place else ""
        yield Fact(f"{each.function}{where}: all {each.labels} labels are ignored")
