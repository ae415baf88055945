"""A diagnosis in words: a few lines of 80 columns. No torch."""

import math
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradsight.values.diagnoses import (
    NO_SINGLE_SAMPLE,
    Diagnosis,
    GuiltyOperation,
    GuiltySample,
    TensorSummary,
)
from gradsight.values.plain import listed
from gradsight.values.texts import for_markdown

WIDTH = 80
_SOURCE = 48
_SAMPLES = 3
_NOTES = 3
_WORTH_A_LINE = 1.0
"""From how many seconds on a report says how long the diagnosis took."""


def diagnosis_lines(diagnosis: Diagnosis, width: int = WIDTH) -> list[str]:
    """The operation, its inputs, the samples, what could not be found out, and what it took."""
    several = diagnosis.micro_batches > 1
    lines: list[str] = []
    if diagnosis.operation is not None:
        lines += _operation(diagnosis.operation, several)
    if _have_culprits(diagnosis):
        lines.append(_samples(diagnosis.samples, several))
    lines += [f"note: {note}" for note in diagnosis.notes[:_NOTES]]
    if (more := len(diagnosis.notes) - _NOTES) > 0:
        lines[-1] += f" ({more} more)"
    if lines and diagnosis.seconds >= _WORTH_A_LINE:
        lines.append(f"diagnosed in {diagnosis.seconds:.1f} s")
    return [
        row
        for line in lines
        for row in textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False)
    ]


def markdown_lines(diagnosis: Diagnosis) -> list[str]:
    """The same for Markdown, which is wrapped by whoever shows it."""
    # Whole lines: repr, which quotes ids in them, would undo what was escaped before.
    return [for_markdown(line) for line in diagnosis_lines(diagnosis, width=10**6)]


def short_cause(diagnosis: Diagnosis) -> str:
    """The guilty operation and the worst sample on one line; empty where neither is known."""
    several = diagnosis.micro_batches > 1
    parts = []
    if diagnosis.operation is not None:
        parts.append(next(_operation(diagnosis.operation, several)))
    if _have_culprits(diagnosis):
        parts.append(named(diagnosis.samples[0], several))
    return "; ".join(parts)


def _have_culprits(diagnosis: Diagnosis) -> bool:
    """Return whether to name samples: no if a note says that no single sample is the cause."""
    ranks = {sample.rank for sample in diagnosis.samples}
    is_said = any(note.endswith(NO_SINGLE_SAMPLE) for note in diagnosis.notes)
    return bool(ranks) and not (is_said and len(ranks) == 1)


def _operation(guilty: GuiltyOperation, several: bool) -> Iterator[str]:
    where = ""
    if guilty.place:
        where = f" in {short_place(guilty.place)}"
    if guilty.source:
        where += f" (`{_cut(guilty.source)}`)"
    within = ""
    if several:
        within = f", micro-batch {guilty.micro_batch}"
    if guilty.call is not None:
        within += f", call {guilty.call} of {guilty.calls} (counted from 0)"
    if guilty.rank:
        within += f", rank {guilty.rank}"
    if guilty.phase == "before":
        yield from _before(guilty, where, within)
        return
    if guilty.phase == "loss":
        what = "the loss" if guilty.operation == "loss" else f"{guilty.operation} in the loss"
        yield f"{what}, outside the model{where.replace(' in', ':', 1)}{within}"
    else:
        yield f"{guilty.operation}{where}{_module(guilty)}, {guilty.phase}{within}"
    if guilty.inputs:
        noun = "inputs" if len(guilty.inputs) > 1 else "input"
        yield f"{noun} {'; '.join(map(summarized, guilty.inputs[:3]))}"
    if guilty.detail:
        yield guilty.detail


def _module(guilty: GuiltyOperation) -> str:
    """The module an operation ran in; the name of the model itself is empty."""
    if guilty.module is None:
        return ""
    if guilty.module == "":
        return ", the model itself"
    return f", module {guilty.module}"


def _before(guilty: GuiltyOperation, where: str, within: str) -> Iterator[str]:
    if guilty.operation != "input":
        yield guilty.detail + within
        return
    kind = "NaN" if guilty.inputs and guilty.inputs[0].nan else "an infinity"
    if where:
        yield f"{kind} in the model's input: {guilty.detail}{within}; called{where}"
    else:
        yield f"{kind} in {guilty.detail}{within}"
    yield from (f"it holds {summarized(each)}" for each in guilty.inputs)


def _samples(samples: tuple[GuiltySample, ...], several: bool) -> str:
    broken = [sample for sample in samples if not math.isfinite(sample.norm)]
    if broken:
        names = listed(_without_repetition(broken, several), _SAMPLES)
        return f"{names}: gradient not finite, even as a batch of one"
    worst, *rest = samples
    if worst.share is None:
        return f"{named(worst, several)} has the largest gradient norm, {worst.norm:.3g}"
    share = f"{worst.share:.0%} of the squared norm (its norm: {worst.norm:.3g})"
    text = f"{named(worst, several)} holds {share}"
    if rest and rest[0].share is not None and rest[0].share >= 0.01:
        text += f"; next {named(rest[0], several)}, {rest[0].share:.0%}"
    return text


def _without_repetition(samples: Sequence[GuiltySample], several: bool) -> list[str]:
    """The names of samples; one that is guilty in several calls is named once."""
    calls: dict[GuiltySample, list[int]] = {}
    for sample in samples:
        # Its norm is not compared: NaN is not equal to itself.
        key = replace(sample, call=None, norm=0.0, share=None)
        calls.setdefault(key, []).extend([] if sample.call is None else [sample.call])
    return [_in_calls(key, sorted(numbers), several) for key, numbers in calls.items()]


def _in_calls(sample: GuiltySample, calls: Sequence[int], several: bool) -> str:
    name = named(sample, several)
    if not calls or sample.calls == 1:
        return name
    runs: list[list[int]] = []
    for number in calls:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    plural = "s" if len(calls) > 1 else ""
    return f"{name} in call{plural} {', '.join(words)} of {sample.calls}"


def named(sample: GuiltySample, several: bool = True) -> str:
    """Which sample it is: by its id where it has one.

    >>> named(GuiltySample(7, "doc-3", 2, 1, 1.0, None))
    "sample 'doc-3' (row 7 of micro-batch 2, rank 1)"
    """
    row = str(sample.row)
    if several:
        row += f" of micro-batch {sample.micro_batch}"
    if sample.call is not None:
        row += f" in call {sample.call} of {sample.calls} (counted from 0)"
    if sample.sample_id is None:
        of_rank = f" of rank {sample.rank}" if sample.rank else ""
        return f"sample {row}{of_rank}"
    rank = f", rank {sample.rank}" if sample.rank else ""
    return f"sample {sample.sample_id!r} (row {row}{rank})"


def summarized(tensor: TensorSummary) -> str:
    """A tensor in a few words.

    >>> summarized(TensorSummary((16, 10), "float32", 0.0, 0.98, 2, 0))
    '16x10 float32, 0 .. 0.98, 2 NaN'
    """
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    words = [f"{shape} {tensor.dtype}"]
    if tensor.smallest is not None and tensor.largest is not None:
        values = f"{tensor.smallest:.3g}"
        if tensor.smallest != tensor.largest:
            values += f" .. {tensor.largest:.3g}"
        words.append(values)
    if tensor.nan:
        words.append(f"{tensor.nan} NaN")
    if tensor.inf:
        words.append(f"{tensor.inf} Inf")
    return ", ".join(words)


def short_place(place: str) -> str:
    """The file without its folders, and the line."""
    return os.path.basename(place)


def _cut(source: str) -> str:
    """A line of source without its comment, cut to a width."""
    # Two spaces, so that a "#" inside a text is not taken for a comment.
    source = source.split("  #")[0]
    if len(source) <= _SOURCE:
        return source
    return source[: _SOURCE - 3] + "..."
