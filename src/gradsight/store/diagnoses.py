"""Diagnoses as they are stored, and those of several ranks as one. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradsight.values.diagnoses import Diagnosis, GuiltyOperation, GuiltySample, TensorSummary

_MOST_SAMPLES = 64


def unpack_diagnosis(value: Any) -> Diagnosis | None:
    """Back from JSON; raises TypeError, ValueError or KeyError where it is none."""
    if value is None:
        return None
    operation = value["operation"]
    return Diagnosis(
        operation=None if operation is None else _operation(operation),
        samples=tuple(_sample(each) for each in value["samples"]),
        seconds=float(value["seconds"]),
        notes=tuple(str(note) for note in value["notes"]),
        micro_batches=int(value.get("micro_batches", 1)),
    )


def _operation(value: Mapping[str, Any]) -> GuiltyOperation:
    return GuiltyOperation(**{**value, "inputs": tuple(_summary(each) for each in value["inputs"])})


def _summary(value: Mapping[str, Any]) -> TensorSummary:
    limits = {
        name: None if value[name] is None else float(value[name])
        for name in ("smallest", "largest")
    }
    return TensorSummary(**{**value, "shape": tuple(value["shape"]), **limits})


def _sample(value: Mapping[str, Any]) -> GuiltySample:
    share = value["share"]
    return GuiltySample(
        **{**value, "norm": float(value["norm"]), "share": None if share is None else float(share)}
    )


def numbered(diagnosis: Diagnosis, rank: int, first: int, passes: int) -> Diagnosis:
    """With the rank's number, and micro-batches counted from the step's first one of `passes`."""
    samples = tuple(
        replace(each, rank=rank, micro_batch=each.micro_batch + first) for each in diagnosis.samples
    )
    operation = diagnosis.operation
    if operation is not None:
        operation = replace(operation, rank=rank, micro_batch=operation.micro_batch + first)
    return replace(diagnosis, samples=samples, operation=operation, micro_batches=max(1, passes))


def merge_diagnoses(parts: Sequence[Diagnosis]) -> Diagnosis | None:
    """What the ranks found, as one: the first operation, the samples of all with shares of the
    whole, the longest time.

    Each rank knows its own samples only, and shares of their sum; the sums are had back from norms
    and shares. Where some rank found something that is not finite, the others have nothing to add.
    """
    parts = [part for part in parts if is_broken(part)] or parts
    if len(parts) < 2:
        return parts[0] if parts else None
    found = [part.operation for part in parts if part.operation is not None]
    first = min(found, key=lambda operation: (operation.micro_batch, operation.rank), default=None)
    total = sum(_sum_of_squares(part.samples) for part in parts)
    samples = [
        replace(sample, share=_share(sample, total)) for part in parts for sample in part.samples
    ]
    samples.sort(
        key=lambda sample: (
            math.isfinite(sample.norm),
            -sample.norm if math.isfinite(sample.norm) else 0.0,
        )
    )
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    seconds, micro_batches = (
        max(part.seconds for part in parts),
        max(part.micro_batches for part in parts),
    )
    return Diagnosis(first, tuple(samples[:_MOST_SAMPLES]), seconds, tuple(notes), micro_batches)


def is_broken(part: Diagnosis) -> bool:
    """Whether something that is not finite was found."""
    return part.operation is not None or any(
        not math.isfinite(sample.norm) for sample in part.samples
    )


def _sum_of_squares(samples: Sequence[GuiltySample]) -> float:
    return next((sample.norm**2 / sample.share for sample in samples if sample.share), 0.0)


def _share(sample: GuiltySample, total: float) -> float | None:
    return sample.norm**2 / total if sample.share is not None and total else None
