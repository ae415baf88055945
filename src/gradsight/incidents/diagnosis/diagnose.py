"""The diagnosis of a bad step: its guilty operation, its guilty samples, and what is not known."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor, nn

from gradsight.core.calls import CallNumber, RecordedCall, micro_batches, numbered
from gradsight.core.group import is_distributed, rank, world_size
from gradsight.core.parameters import unwrapped
from gradsight.core.samples import tensors_in
from gradsight.core.shards import are_spread
from gradsight.errors import GradsightError
from gradsight.incidents.diagnosis.loss import fault_beside_outputs, fault_in_graph
from gradsight.incidents.diagnosis.numbers import nonfinite_in
from gradsight.incidents.diagnosis.operation import (
    OutputKind,
    broken_before,
    find_forward_operation,
    find_operation,
)
from gradsight.incidents.diagnosis.samples import SampleNorms, have_same_rows, measure_samples
from gradsight.incidents.diagnosis.watcher import Budget, OutOfTime
from gradsight.incidents.kept_calls import BackwardGraph
from gradsight.values.diagnoses import NO_SINGLE_SAMPLE, Diagnosis, GuiltyOperation, GuiltySample

Kind = Literal["nonfinite", "spike"]
_NEARLY_ALL = 0.9
"""The share of samples from which on none of them stands out."""


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
    micro_batches: int = 1
    """How many the step had."""
    not_run: str | None = None
    """Why the step must not be run again; None if it may be."""
    failures: dict[str, str] = field(default_factory=dict)
    """Errors that the model raised when it was run again, by purpose. Gradsight does not run it
    for that purpose again."""
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
    calls = numbered(calls)
    options = replace(options, micro_batches=micro_batches(calls))
    refusal = _refusal(root, calls)
    if refusal is not None:
        return Diagnosis(None, (), budget.spent(), (refusal,), options.micro_batches)
    notes: list[str] = []
    operation = None
    if options.not_run is not None:
        notes.append(f"the step was not run again: {options.not_run}")
        if options.kind == "nonfinite":
            operation = next(filter(None, (broken_before(root, call) for call in calls)), None)
        return Diagnosis(operation, (), budget.spent(), tuple(notes), options.micro_batches)
    if options.kind == "nonfinite":
        operation = _operation(root, calls, options, budget, notes)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        # It divides by the number of ranks, after the gradients at the outputs.
        options = replace(options, scale=options.scale * world_size())
    first = None if operation is None else (operation.micro_batch, operation.call or 0)
    samples = _samples(root, calls, options, budget, notes, first)
    return Diagnosis(
        operation, samples, budget.spent(), tuple(dict.fromkeys(notes)), options.micro_batches
    )


def diagnose_loss(
    model: nn.Module,
    calls: Sequence[RecordedCall],
    graph: BackwardGraph,
    options: DiagnosisOptions,
) -> Diagnosis:
    """Say what made a loss non-finite that backward was not called on.

    calls: those of the model in that step. graph: of the loss, from the model's outputs on.
    """
    budget = Budget(options.seconds, options.clock)
    root = unwrapped(model)
    calls = numbered(calls)
    options = replace(options, micro_batches=micro_batches(calls))
    why = options.not_run
    if why is None and calls:
        why = _refusal(root, calls)
    notes: list[str] = []
    outputs: list[OutputKind] = []
    operation = None
    if why is not None:
        notes.append(f"the step was not run again: {why}")
        operation = next(filter(None, (broken_before(root, call) for call in calls)), None)
        return Diagnosis(operation, (), budget.spent(), tuple(notes), options.micro_batches)
    for call in calls:
        name = _name_of([call], options.micro_batches)
        with _survived(name, "operations", options, budget, notes):
            operation, kinds = find_forward_operation(root, call, budget)
            outputs += kinds
        if operation is not None or notes:
            break
    if operation is None and not notes:
        operation = fault_in_graph(graph, outputs)
    if operation is None and not notes:
        notes.append("Gradsight could not find the operation that made the loss non-finite")
    return Diagnosis(operation, (), budget.spent(), tuple(notes), options.micro_batches)


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
    if "operations" in options.failures:
        notes.append(_failed_before("operations", options))
        return next(filter(None, (broken_before(root, call) for call in calls)), None)
    for group in _by_micro_batch(calls):
        operation = _operation_of(root, group, options, budget, troubles)
        if operation is not None:
            notes += troubles
            return operation
        if budget.is_over() or "operations" in options.failures:
            break
    if "operations" in options.failures:
        notes += troubles
        return next(filter(None, (broken_before(root, call) for call in calls)), None)
    if not troubles and not budget.is_over():
        operation = fault_beside_outputs(calls, options.loss_root)
        if operation is not None:
            return operation
    notes += troubles or [
        "run again, everything was finite: the fault did not come back, or lies outside the model"
    ]
    return None


def _by_micro_batch(calls: Sequence[RecordedCall]) -> list[list[RecordedCall]]:
    """The calls of each micro-batch."""
    groups: dict[int, list[RecordedCall]] = {}
    for call in calls:
        groups.setdefault(_number(call).micro_batch, []).append(call)
    return list(groups.values())


def _operation_of(
    root: nn.Module,
    group: Sequence[RecordedCall],
    options: DiagnosisOptions,
    budget: Budget,
    troubles: list[str],
) -> GuiltyOperation | None:
    """The guilty operation of a micro-batch.

    What broke in a forward pass came before all that broke in backward. Backward goes through the
    calls in reverse, where a later one uses the outputs of an earlier one.
    """
    found = []
    for call in group[_first_suspect(group) :]:
        if "operations" in options.failures:
            break
        operation = None
        others = [other for other in group if other is not call]
        name = _name_of([call], options.micro_batches)
        with _survived(name, "operations", options, budget, troubles):
            operation = find_operation(
                root, call, budget, others=others, loss_root=options.loss_root
            )
        if operation is not None and operation.phase in ("before", "forward"):
            return operation
        if budget.is_over() and len(group) > 1:
            return None
        if operation is not None:
            found.append(operation)
    if any(_number(call).continues for call in group):
        return found[-1] if found else None
    of_backward = [operation for operation in found if operation.phase != "loss"]
    if not of_backward and len(found) == len(group) > 1:
        return replace(found[0], call=None)  # the loss broke all of them: none stands out
    return next(iter(of_backward + found), None)


def _first_suspect(group: Sequence[RecordedCall]) -> int:
    """The place of the call before the first one that was given a NaN.

    What that one was given may be an output of the call before.
    """
    for place, call in enumerate(group):
        if any(nonfinite_in(x) == "nan" for x in tensors_in(*call.args, *call.kwargs.values())):
            return max(0, place - 1)
    return 0


def _number(call: RecordedCall) -> CallNumber:
    return call.number or CallNumber(0)


def _samples(
    root: nn.Module,
    calls: Sequence[RecordedCall],
    options: DiagnosisOptions,
    budget: Budget,
    notes: list[str],
    first: tuple[int, int] | None,
) -> tuple[GuiltySample, ...]:
    """The guilty samples over all calls, measured from the guilty operation's call on.

    first: the micro-batch of the guilty operation, and its call.
    """
    if "samples" in options.failures:
        notes.append(_failed_before("samples", options))
        return ()
    units = [unit for group in _by_micro_batch(calls) for unit in _measured_together(root, group)]
    measured: list[tuple[Sequence[RecordedCall], SampleNorms]] = []
    troubles: list[str] = []

    # Time may run out: the call of the guilty operation comes first.
    for unit in sorted(units, key=lambda unit: first not in [_place(call) for call in unit]):
        norms = SampleNorms()
        measured.append((unit, norms))
        name = _name_of(unit, options.micro_batches)
        with _survived(name, "samples", options, budget, troubles):
            measure_samples(root, unit, budget, norms)
        notes += norms.notes
        if budget.is_over() or "samples" in options.failures:
            break
    notes += troubles
    samples = list(_named(measured, options.scale))
    complete = len(measured) == len(units) and all(norms.complete for _, norms in measured)
    if samples and not complete:
        notes.append(
            f"the gradients of {len(samples)} samples were taken, not of all: no shares are given"
        )
    broken = sum(not math.isfinite(sample.norm) for sample in samples)
    if len(samples) > 1 and broken >= _NEARLY_ALL * len(samples):
        how_many = f"all {broken}" if broken == len(samples) else f"{broken} of {len(samples)}"
        notes.append(f"the gradients of {how_many} samples are not finite: {NO_SINGLE_SAMPLE}")
    return ranked(samples, complete=complete, most=options.most)


def _measured_together(
    root: nn.Module, group: Sequence[RecordedCall]
) -> list[Sequence[RecordedCall]]:
    """The calls of a micro-batch, as one where a sample has the same row in all of them."""
    learning = [call for call in group if _learns(call)]
    several = len({call.part for call in learning}) > 1
    continued = any(_number(call).continues for call in learning)
    if (several or continued) and have_same_rows(root, learning):
        return [learning]
    return [[call] for call in learning]


def _name_of(unit: Sequence[RecordedCall], micro_batches: int) -> str:
    """Which calls these are, in words."""
    names = [_number(call).among(micro_batches) for call in unit]
    if len(unit) == 1:
        return names[0]
    return f"{names[0]} to {names[-1]}"


def _named(
    measured: Sequence[tuple[Sequence[RecordedCall], SampleNorms]], scale: float
) -> Iterator[GuiltySample]:
    """Every measured sample, as one of this rank's."""
    for unit, norms in sorted(measured, key=lambda each: _place(each[0][0])):
        number = _number(unit[0])
        ids = next((call.sample_ids for call in unit if call.sample_ids is not None), None)
        call = number.named_call if len(unit) == 1 else None
        for row, norm in sorted(norms.by_row.items()):
            yield GuiltySample(
                row,
                None if ids is None else ids[row],
                number.micro_batch,
                rank(),
                norm / scale,
                None,
                call,
                number.calls,
            )


def _place(call: RecordedCall) -> tuple[int, int]:
    return _number(call).micro_batch, _number(call).call


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


def _failed_before(purpose: str, options: DiagnosisOptions) -> str:
    return (
        f"the step was not run again to find its {purpose}: doing so {options.failures[purpose]} "
        "at an earlier step"
    )


@contextmanager
def _survived(
    name: str, purpose: str, options: DiagnosisOptions, budget: Budget, troubles: list[str]
) -> Iterator[None]:
    """Whatever goes wrong in here becomes a note."""
    what = f"{name} again to find its {purpose}"
    try:
        yield
    except OutOfTime:
        troubles.append(f"the {budget.seconds:g} s of the diagnosis were over while running {what}")
    except GradsightError as error:
        troubles.append(f"running {what}: {error}")
    except Exception as error:
        raised = f"raised {type(error).__name__}: {str(error)[:200]}"
        troubles.append(f"running {what} {raised}")
        options.failures[purpose] = raised
