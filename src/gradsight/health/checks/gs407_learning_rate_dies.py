"""GS407: a learning rate that dies before training ends."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS407",
    "the learning rate dies",
    "warning",
    asked=Asked(needs=("lr",), gate=lambda window: window.steps_of_no_lr > 0),
    advice=Advice(
        recommendation=(
            "The learning rate is next to nothing while training goes on: step a scheduler that "
            "counts epochs once per epoch, or give it the number of steps."
        ),
        fix="""
# before the loop: a schedule over all steps of the training
epochs = 10
steps = epochs * len(loader)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

# in the loop, after optimizer.step(): count steps, not epochs
scheduler.step()
""",
    ),
)
def dies(window: Window, *, steps: int = 20, share: float = 0.25) -> Iterator[Fact]:
    """The learning rate is next to nothing for a large part of training.

    Why: the steps that follow change nothing. Most often a scheduler that is meant for epochs is
    stepped at every batch. One that ends near zero, as a cosine does, is there for the last few
    percent only, and left alone.
    """
    dead = window.steps_of_no_lr
    if dead >= steps and dead >= share * window.steps_seen:
        text = (
            f"{window.step.lr:.2g} for {dead} of {window.steps_seen} steps, after "
            f"{window.highest_lr:.2g}"
        )
        yield Fact(text, first_step=window.step.step - dead + 1)
