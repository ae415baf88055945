"""GS502: the same batch again."""

from collections.abc import Iterator

from gradsight.health.fixes import NEW_BATCHES
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS502",
    "the same batch again",
    "warning",
    asked=Asked(needs=("batches",), gate=lambda window: bool(window.now.signals.alike_batches)),
    advice=Advice(
        recommendation=(
            "Every step is given the same batch in new tensors. Check that the loader advances "
            "(next(iter(loader)) starts over), that its random state is not reset, and that the "
            "tokenizer or the template does not turn every text into the same tokens. If this "
            "is full-batch training on purpose, silence this check."
        ),
        fix=NEW_BATCHES,
    ),
)
def stuck(window: Window, *, batches: int = 8) -> Iterator[Fact]:
    """The model is given the same batch again and again.

    Why: the loss falls nicely and nothing general is learned. A script that holds one batch and
    passes it itself does so on purpose and is left alone: only equal batches in new tensors count.
    """
    alike = window.now.signals.alike_batches
    if alike is not None and alike >= batches:
        yield Fact(f"{alike} batches in a row are the same", first_step=window.first_step)
