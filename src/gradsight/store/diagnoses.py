"""Diagnoses as they are stored, and those of several ranks as one. No torch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gradsight.core.records import read_record
from gradsight.values.diagnoses import Diagnosis, GuiltyOperation, GuiltySample

_MOST_SAMPLES = 64


def unpack_diagnosis(value: Any, name: str = "a diagnosis") -> Diagnosis | None:
    """Back from JSON; an error that names the place where it is none of ours."""
    if value is None:
        return None
    return read_record(Diagnosis, value, name)


def of_rank(diagnosis: Diagnosis, rank: int, micro_batches: int) -> Diagnosis:
    """Return a diagnosis with the number of its rank and of the step's micro-batches."""
    samples = tuple(replace(each, rank=rank) for each in diagnosis.samples)
    operation = diagnosis.operation
    if operation is not None:
        operation = replace(operation, rank=rank)
    micro_batches = max(1, micro_batches)
    return replace(diagnosis, samples=samples, operation=operation, micro_batches=micro_batches)


def merge_diagnoses(parts: Sequence[Diagnosis]) -> Diagnosis | None:
    """The diagnoses of all ranks as one: the first operation, and all samples with their shares.

    Each rank knows its own samples only, and shares of their sum; the sums are had back from norms
    and shares. Where some rank found something that is not finite, the others have nothing to add.
    """
    # A NaN reaches every rank's gradient: only the ranks that made one know something of it.
    parts = [part for part in parts if is_broken(part)] or parts
    if len(parts) < 2:
        return parts[0] if parts else None
    operations = [part.operation for part in parts if part.operation is not None]
    total = sum(_sum_of_squares(part.samples) for part in parts)
    samples = [
        replace(sample, share=_share(sample, total)) for part in parts for sample in part.samples
    ]
    samples.sort(key=_guilt, reverse=True)
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    return Diagnosis(
        operation=min(operations, key=_order, default=None),
        samples=tuple(samples[:_MOST_SAMPLES]),
        seconds=max(part.seconds for part in parts),
        notes=tuple(notes),
        micro_batches=max(part.micro_batches for part in parts),
    )


def _order(operation: GuiltyOperation) -> tuple[int, int, int]:
    """What operations are sorted by: the first one is named."""
    return operation.micro_batch, operation.call or 0, operation.rank


def is_broken(part: Diagnosis) -> bool:
    """Whether something that is not finite was found."""
    return part.operation is not None or any(
        not math.isfinite(sample.norm) for sample in part.samples
    )


def _guilt(sample: GuiltySample) -> float:
    """What samples are sorted by: one that is not finite is worse than any norm."""
    if math.isfinite(sample.norm):
        return sample.norm
    return math.inf


def _sum_of_squares(samples: Sequence[GuiltySample]) -> float:
    """The sum of squared norms that the shares of a rank's samples are of."""
    return next((sample.norm**2 / sample.share for sample in samples if sample.share), 0.0)


def _share(sample: GuiltySample, total: float) -> float | None:
    if sample.share is None or not total:
        return None
    return sample.norm**2 / total
