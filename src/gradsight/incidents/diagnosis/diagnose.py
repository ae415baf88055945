"""The diagnosis of a bad step: its guilty operation, its guilty samples, and what is not known."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from gradsight.core.calls import RecordedCall
from gradsight.core.group import is_distributed, rank, world_size
from gradsight.core.parameters import unwrapped
from gradsight.core.shards import are_spread
from gradsight.errors import GradsightError
from gradsight.incidents.diagnosis.operation import find_operation
from gradsight.incidents.diagnosis.samples import SampleNorms, measure_samples
from gradsight.incidents.diagnosis.watcher import Budget, OutOfTime
from gradsight.values.diagnoses import Diagnosis, GuiltyOperation, GuiltySample

Kind = Literal["nonfinite", "spike"]


@dataclass(frozen=True, slots=True)
class DiagnosisOptions:
    """What a diagnosis is for, what it may use, and how long it may take."""

    kind: Kind
    """Whether the gradient was not finite, or large."""
    seconds: float
    loss_root: Tensor | None = None
    """The tensor that backward was called on."""
    scale: float = 1.0
    """What the gradients at the outputs are to be divided by (GradScaler's factor)."""
    most: int | None = 16
    """How many samples are listed; None lists all."""
    clock: Callable[[], float] = time.perf_counter


def diagnose(
    model: nn.Module, calls: Sequence[RecordedCall], options: DiagnosisOptions
) -> Diagnosis:
    """Run a step's calls again, beside training, and say what made its gradient bad.

    To be called before the optimizer steps on the bad gradient. Nothing is raised and nothing is
    left behind: parameters, buffers, `.grad`, generators, modes and hooks are as they were.
    """
    budget = Budget(options.seconds, options.clock)
    root = unwrapped(model)
    refusal = _refusal(root, calls)
    if refusal is not None:
        return Diagnosis(None, (), budget.spent(), (refusal,), len(calls))
    notes: list[str] = []
    operation = None
    if options.kind == "nonfinite":
        operation = _operation(root, calls, options, budget, notes)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        # It divides by the number of ranks, after the gradients at the outputs.
        options = replace(options, scale=options.scale * world_size())
    first = 0 if operation is None else operation.micro_batch
    samples = _samples(root, calls, options, budget, notes, first)
    return Diagnosis(operation, samples, budget.spent(), tuple(dict.fromkeys(notes)), len(calls))


def _refusal(root: nn.Module, calls: Sequence[RecordedCall]) -> str | None:
    """Why a step cannot be run again on this rank alone."""
    if not calls:
        return "no pass of this step was kept, so nothing could be run again"
    modules = list(root.modules())
    wrapped = any(type(module).__name__ == "FullyShardedDataParallel" for module in modules)
    if wrapped or are_spread(list(root.parameters())):
        return (
            "the parameters are spread over ranks: "
            "one rank alone cannot run the step again without the others"
        )
    if is_distributed() and any(isinstance(module, nn.SyncBatchNorm) for module in modules):
        return (
            "SyncBatchNorm talks to all ranks: "
            "one rank alone cannot run the step again without the others"
        )
    return None


def _operation(
    root: nn.Module,
    calls: Sequence[RecordedCall],
    options: DiagnosisOptions,
    budget: Budget,
    notes: list[str],
) -> GuiltyOperation | None:
    """The guilty operation of the first micro-batch that has one."""
    troubles: list[str] = []
    for number, call in enumerate(calls):
        operation = None
        with _survived(f"micro-batch {number} for its operations", budget, troubles):
            operation = find_operation(root, call, number, budget, loss_root=options.loss_root)
        if operation is not None:
            notes += troubles
            return operation
        if budget.is_over():
            break
    notes += troubles or [
        "run again, everything was finite: the fault did not come back, or lies outside the model"
    ]
    return None


def _samples(
    root: nn.Module,
    calls: Sequence[RecordedCall],
    options: DiagnosisOptions,
    budget: Budget,
    notes: list[str],
    first: int,
) -> tuple[GuiltySample, ...]:
    """The guilty samples over all micro-batches, measured from the guilty operation's on."""
    by_number: dict[int, SampleNorms] = {}
    troubles: list[str] = []
    learning = [number for number, call in enumerate(calls) if _learns(call)]
    # Time may run out: the micro-batch of the guilty operation comes first.
    for number in sorted(learning, key=lambda n: (n != first, n)):
        norms = SampleNorms()
        by_number[number] = norms
        with _survived(f"micro-batch {number} for its samples", budget, troubles):
            measure_samples(root, calls[number], budget, norms)
        notes += norms.notes
        if budget.is_over():
            break
    notes += troubles
    samples = list(_named(by_number, calls, options.scale))
    complete = all(number in by_number and by_number[number].complete for number in learning)
    if samples and not complete:
        notes.append(
            f"the gradients of {len(samples)} samples were taken, not of all: no shares are given"
        )
    if len(samples) > 1 and not any(math.isfinite(sample.norm) for sample in samples):
        notes.append(f"the gradients of all {len(samples)} samples are not finite: none stands out")
    return ranked(samples, complete=complete, most=options.most)


def _named(
    by_number: Mapping[int, SampleNorms], calls: Sequence[RecordedCall], scale: float
) -> Iterator[GuiltySample]:
    """Every measured sample, as one of this rank's."""
    for number, norms in sorted(by_number.items()):
        ids = calls[number].sample_ids
        for row, norm in sorted(norms.by_row.items()):
            sample_id = None if ids is None else ids[row]
            yield GuiltySample(row, sample_id, number, rank(), norm / scale, None)


def ranked(
    samples: Sequence[GuiltySample], *, complete: bool = True, most: int | None = None
) -> tuple[GuiltySample, ...]:
    """The worst first, with their shares: those that are not finite, or else the largest.

    `complete` says that no sample of the step is missing; else there are no shares.

    >>> two = [GuiltySample(row, None, 0, 0, norm, None) for row, norm in enumerate((1.0, 3.0))]
    >>> [(sample.row, sample.share) for sample in ranked(two)]
    [(1, 0.9), (0, 0.1)]
    """
    broken = [sample for sample in samples if not math.isfinite(sample.norm)]
    if broken:
        return tuple(replace(sample, share=None) for sample in broken[:most])
    worst = sorted(samples, key=lambda sample: -sample.norm)[:most]
    total = sum(sample.norm**2 for sample in samples)
    if not complete or not 0 < total < math.inf:
        return tuple(replace(sample, share=None) for sample in worst)
    return tuple(replace(sample, share=sample.norm**2 / total) for sample in worst)


def _learns(call: RecordedCall) -> bool:
    """False for a call that no gradient came back to, such as one without autograd."""
    gradients = call.output_gradients
    return gradients is None or any(gradient is not None for gradient in gradients)


@contextmanager
def _survived(what: str, budget: Budget, troubles: list[str]) -> Iterator[None]:
    """Whatever goes wrong in here becomes a note."""
    try:
        yield
    except OutOfTime:
        troubles.append(f"the {budget.seconds:g} s of the diagnosis were over while running {what}")
    except GradsightError as error:
        troubles.append(f"running {what}: {error}")
    except Exception as error:
        troubles.append(f"running {what} raised {type(error).__name__}: {str(error)[:200]}")
