"""Which of the measured samples are the guilty ones. Also of several ranks together."""

import math
from collections.abc import Sequence
from dataclasses import replace

from gradsight.values.diagnoses import GuiltySample


def ranked(
    samples: Sequence[GuiltySample], *, complete: bool = True, most: int | None = None
) -> tuple[GuiltySample, ...]:
    """The worst first, with their shares: those that are not finite, and if there are none, the
    largest.

    `complete` says that no sample of the step is missing; else there are no shares. Several ranks' samples may be put together.

    >>> two = [GuiltySample(row, None, 0, 0, norm, None) for row, norm in enumerate((1.0, 3.0))]
    >>> [(sample.row, sample.share) for sample in ranked(two)]
    [(1, 0.9), (0, 0.1)]
    """
    broken = [sample for sample in samples if not math.isfinite(sample.norm)]
    if broken:
        return tuple(replace(sample, share=None) for sample in broken[:most])
    total = sum(sample.norm**2 for sample in samples)
    known = complete and 0 < total < math.inf
    worst = sorted(samples, key=lambda sample: -sample.norm)[:most]
    return tuple(
        replace(sample, share=sample.norm**2 / total if known else None) for sample in worst
    )


def all_broken(samples: Sequence[GuiltySample]) -> bool:
    """Whether every sample's gradient is not finite, so that none stands out."""
    return len(samples) > 1 and all(not math.isfinite(sample.norm) for sample in samples)
