"""GS614: most samples have no label that counts."""

from collections.abc import Iterator
from math import comb

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window

_MANY = 500
"""Larger batches are scaled down to this size: the probability hardly changes."""


@check(
    "GS614",
    "most samples have no label that counts",
    "warning",
    asked=Asked(when="first", needs=("first step",)),
    advice=Advice(
        recommendation=(
            "Look at the samples without a label. Often the prompt is longer than the maximum "
            "length, so that the answer is cut off, or the template that marks the answer is not "
            "found in the text. Raise the maximum length, shorten prompts, or leave such samples "
            "out of the data set."
        ),
        fix="""
# before the loop: print how many labels of each sample are not -100
for _, (inputs, targets) in zip(range(4), loader):
    counts = (targets != -100).flatten(1).sum(1)
    print("Labels that count:", counts.tolist())
""",
    ),
)
def few_samples(window: Window, *, share: float = 0.5, chance: float = 0.01) -> Iterator[Fact]:
    """Most samples of the first batches have no label that counts.

    Why: these samples cost as much as others and teach nothing, and a step learns from far fewer
    samples than the batch size says. If labels are rare but spread over all samples, as in masked
    language modelling, some samples are empty by chance. Nothing is reported if randomly placed
    labels would leave as many samples empty with a probability of `chance` or more.
    """
    first = window.now.signals.first
    seen = None if first is None else first.samples
    if seen is None or seen.samples < 3 or not seen.counted:
        return
    if seen.empty <= share * seen.samples:
        return
    part = seen.counted / seen.labels
    alone = (1 - part) ** (seen.labels / seen.samples)
    if _at_least(seen.empty, seen.samples, alone) >= chance:
        return
    yield Fact(
        f"{seen.empty} of {seen.samples} samples have no label that counts; "
        f"{seen.counted} of {seen.labels} labels count in all ({part:.0%})"
    )


def _at_least(count: int, samples: int, alone: float) -> float:
    """Return the probability of `count` or more empty samples; `alone` is that of one sample."""
    if samples > _MANY:
        count, samples = count * _MANY // samples, _MANY
    return sum(
        comb(samples, number) * alone**number * (1 - alone) ** (samples - number)
        for number in range(count, samples + 1)
    )
