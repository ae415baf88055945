"""A diagnosis in words: a few lines of 80 columns. No torch."""

import math
import os
import textwrap
from collections.abc import Iterator

from gradsight.values.diagnoses import Diagnosis, GuiltyOperation, GuiltySample, TensorSummary

WIDTH = 80
_SOURCE = 48
_SAMPLES = 3
_NOTES = 3


def describe(diagnosis: Diagnosis, width: int = WIDTH) -> list[str]:
    """The operation, its inputs, the samples, what could not be found out, and what it took."""
    several = diagnosis.micro_batches > 1
    lines = (
        list(_operation(diagnosis.operation, several)) if diagnosis.operation is not None else []
    )
    if diagnosis.samples:
        lines.append(_samples(diagnosis.samples, several))
    lines += [f"note: {note}" for note in diagnosis.notes[:_NOTES]]
    if (more := len(diagnosis.notes) - _NOTES) > 0:
        lines[-1] += f" ({more} more)"
    lines.append(f"diagnosed in {diagnosis.seconds:.1f} s")
    return [
        row
        for line in lines
        for row in textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False)
    ]


def _operation(found: GuiltyOperation, several: bool) -> Iterator[str]:
    where = f" in {short_place(found.place)}" if found.place else ""
    if found.source:
        where += f" (`{_cut(found.source)}`)"
    within = f", micro-batch {found.micro_batch}" if several else ""
    within += f", rank {found.rank}" if found.rank else ""
    if found.phase == "before":
        yield from _before(found, where, within)
        return
    if found.phase == "loss":
        what = "the loss" if found.operation == "loss" else f"{found.operation} in the loss"
        yield f"{what}, outside the model{where.replace(' in', ':', 1)}{within}"
    else:
        module = (
            f", module {found.module}"
            if found.module
            else ", the model itself"
            if found.module == ""
            else ""
        )
        yield f"{found.operation}{where}{module}, {found.phase}{within}"
    if found.inputs:
        yield f"{'inputs' if len(found.inputs) > 1 else 'input'} {'; '.join(map(summarized, found.inputs[:3]))}"
    if found.detail:
        yield found.detail


def _before(found: GuiltyOperation, where: str, within: str) -> Iterator[str]:
    if found.operation != "input":
        yield found.detail + within
        return
    kind = "NaN" if found.inputs and found.inputs[0].nan else "an infinity"
    yield (
        f"{kind} in the model's input: {found.detail}{within}; called{where}"
        if where
        else f"{kind} in {found.detail}{within}"
    )
    yield from (f"it holds {summarized(each)}" for each in found.inputs)


def _samples(samples: tuple[GuiltySample, ...], several: bool) -> str:
    broken = [sample for sample in samples if not math.isfinite(sample.norm)]
    if broken:
        names = ", ".join(named(sample, several) for sample in broken[:_SAMPLES])
        more = f" and {len(broken) - _SAMPLES} more" if len(broken) > _SAMPLES else ""
        return f"{names}{more}: gradient not finite, alone too"
    worst, *rest = samples
    if worst.share is None:
        return f"{named(worst, several)} has the largest gradient norm, {worst.norm:.3g}"
    then = (
        f"; next {named(rest[0], several)}, {rest[0].share:.0%}"
        if rest and (rest[0].share or 0.0) >= 0.01
        else ""
    )
    return f"{named(worst, several)} holds {worst.share:.0%} of the squared norm (its norm: {worst.norm:.3g}){then}"


def named(sample: GuiltySample, several: bool = True) -> str:
    """Which sample it is: by its id where it has one.

    >>> named(GuiltySample(7, "doc-3", 2, 1, 1.0, None))
    "sample 'doc-3' (row 7 of micro-batch 2, rank 1)"
    """
    place = f" of micro-batch {sample.micro_batch}" if several else ""
    of_rank = f" of rank {sample.rank}" if sample.rank else ""
    if sample.sample_id is None:
        return f"sample {sample.row}{place}{of_rank}"
    return f"sample {sample.sample_id!r} (row {sample.row}{place}{of_rank.replace(' of', ',')})"


def summarized(tensor: TensorSummary) -> str:
    """A tensor in a few words.

    >>> summarized(TensorSummary((16, 10), "float32", 0.0, 0.98, 2, 0))
    '16x10 float32, 0 .. 0.98, 2 NaN'
    """
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    words = [f"{shape} {tensor.dtype}"]
    if tensor.smallest is not None and tensor.largest is not None:
        one = tensor.smallest == tensor.largest
        words.append(
            f"{tensor.smallest:.3g}" if one else f"{tensor.smallest:.3g} .. {tensor.largest:.3g}"
        )
    words += [
        f"{count} {what}" for count, what in ((tensor.nan, "NaN"), (tensor.inf, "Inf")) if count
    ]
    return ", ".join(words)


def short_place(place: str) -> str:
    """The file without its folders, and the line."""
    return os.path.basename(place)


def _cut(source: str) -> str:
    source = source.split("  #")[0]
    return source if len(source) <= _SOURCE else source[: _SOURCE - 3] + "..."
