"""Epochs, where training counts steps: samples come in one stream, and an epoch may end inside a
step. No torch.
"""

from dataclasses import replace

from gradsight.train.config import Settings


def with_steps(settings: Settings, epoch_length: int, per_step: int) -> Settings:
    """The settings with max_steps as many as their epochs take, if they are given in epochs.

    >>> with_steps(Settings(epochs=10), epoch_length=9, per_step=4).max_steps
    23
    """
    if settings.epochs is None:
        return settings
    steps = -(-settings.epochs * epoch_length // per_step)
    # Only one of the two is kept: a resumed run may be given more of either.
    return replace(settings, max_steps=steps, epochs=None)


def epochs_to_log(start: int, end: int, epoch_length: int, every: int) -> list[int]:
    """The epochs that are due, every so many, and begin within a step of samples start to end - 1.

    >>> epochs_to_log(44, 48, epoch_length=9, every=5)
    [5]
    """
    if not every:
        return []
    begun = range(-(-start // epoch_length), -(-end // epoch_length))
    return [epoch for epoch in begun if epoch % every == 0]


def last_epoch(start: int, end: int, epoch_length: int) -> int:
    """What the end of the run is called, whose last step has samples start to end - 1.

    The number of whole epochs if one ends within this step, else the one that is cut short.

    >>> last_epoch(88, 92, epoch_length=9), last_epoch(4, 8, epoch_length=9)
    (10, 1)
    """
    return max(start // epoch_length + 1, end // epoch_length)
