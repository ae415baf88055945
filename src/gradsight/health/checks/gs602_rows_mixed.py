"""GS602: rows that see each other."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS602",
    "rows see each other",
    "warning",
    asked=Asked(when="first", needs=("first step",)),
    advice=Advice(
        recommendation=(
            "What the model gives for one row depends on the input of another: look for "
            "layers that want time first (batch_first), softmax or statistics over dimension "
            "0, and view() where transpose() is meant. If rows are compared on purpose, "
            "silence this check."
        ),
        fix="""
# before the loop: tell layers that expect time first
# (if the first dimension of your batches is the samples)
for module in model.modules():
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        module.batch_first = True
""",
    ),
)
def rows_mixed(window: Window, *, ratio: float = 1e-4) -> Iterator[Fact]:
    """What the model gives for a row depends on other rows of the batch.

    Why: it learns from who happens to be in the batch, and gives something else when it is
    used. BatchNorm does so on purpose and is looked past; so are similarities of all rows with
    all, and graphs.
    """
    first = window.now.signals.first
    leak = None if first is None else first.rows
    if leak is not None and leak.ratio > ratio:
        yield Fact(leak.example)
