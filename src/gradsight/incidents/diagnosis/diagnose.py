"""The diagnosis of a bad step: its guilty operation, its guilty samples, and what could not be
found out.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import Tensor, nn

from gradsight.core.calls import RecordedCall
from gradsight.core.group import is_distributed, rank, world_size
from gradsight.core.parameters import unwrapped
from gradsight.core.shards import are_spread
from gradsight.errors import GradsightError
from gradsight.incidents.diagnosis.budget import Budget, OutOfTime
from gradsight.incidents.diagnosis.operation import find_operation
from gradsight.incidents.diagnosis.ranking import all_broken, ranked
from gradsight.incidents.diagnosis.rerun import Rerun
from gradsight.incidents.diagnosis.samples import Norms, measure
from gradsight.values.diagnoses import Diagnosis, GuiltyOperation, GuiltySample

Kind = Literal["nonfinite", "spike"]


def diagnose(
    model: nn.Module,
    passes: Sequence[RecordedCall],
    *,
    seconds: float,
    kind: Kind,
    loss_root: Tensor | None = None,
    rerun: Rerun | None = None,
    scale: float = 1.0,
    most: int | None = 16,
) -> Diagnosis:
    """Run a step's passes again, aside, and say what made its gradient non-finite ("nonfinite") or
    large ("spike").

    To be called before the optimizer steps on the bad gradient. Nothing is raised and nothing is
    left behind: parameters, buffers, `.grad`, generators, modes and hooks are as they were.
    `loss_root` is what backward was called on; `rerun(model, number)` runs micro-batch `number` up
    to its loss, where that can be done. `scale` is what the gradients at the outputs are to be
    divided by (GradScaler's factor). `most` limits the samples that are listed; None lists all.
    """
    budget, notes = Budget(seconds), list[str]()
    root = unwrapped(model)
    if (refusal := _refusal(root, passes)) is not None:
        return Diagnosis(None, (), budget.spent(), (refusal,), len(passes))
    operation = None
    if kind == "nonfinite":
        operation = _operation(root, passes, budget, notes, loss_root, rerun)
    reduced = world_size() if isinstance(model, nn.parallel.DistributedDataParallel) else 1
    samples = _samples(root, passes, budget, notes, operation, scale * reduced, most)
    return Diagnosis(operation, samples, budget.spent(), tuple(dict.fromkeys(notes)), len(passes))


def _refusal(root: nn.Module, passes: Sequence[RecordedCall]) -> str | None:
    """Why a step cannot be run again on this rank alone."""
    if not passes:
        return "no pass of this step was kept, so nothing could be run again"
    wrapped = any(type(module).__name__ == "FullyShardedDataParallel" for module in root.modules())
    if wrapped or are_spread(list(root.parameters())):
        return "the parameters are spread over ranks: one rank alone cannot run the step again without the others"
    if is_distributed() and any(isinstance(module, nn.SyncBatchNorm) for module in root.modules()):
        return "SyncBatchNorm talks to all ranks: one rank alone cannot run the step again without the others"
    return None


def _operation(
    root: nn.Module,
    passes: Sequence[RecordedCall],
    budget: Budget,
    notes: list[str],
    loss_root: Tensor | None,
    rerun: Rerun | None,
) -> GuiltyOperation | None:
    """The guilty operation of the first micro-batch that has one."""
    troubles: list[str] = []
    for number, one in enumerate(passes):
        found = None
        with _survived(f"micro-batch {number} for its operations", budget, troubles):
            found = find_operation(root, one, number, budget, loss_root=loss_root, rerun=rerun)
        if found is not None:
            notes += troubles
            return found
        if budget.is_over():
            break
    notes += troubles or [
        "run again, everything was finite: the fault did not come back, or lies outside the model"
    ]
    return None


def _samples(
    root: nn.Module,
    passes: Sequence[RecordedCall],
    budget: Budget,
    notes: list[str],
    operation: GuiltyOperation | None,
    scale: float,
    most: int | None,
) -> tuple[GuiltySample, ...]:
    """The guilty samples over all micro-batches, beginning with the one of the guilty operation."""
    norms: dict[int, Norms] = {}
    troubles: list[str] = []
    first = operation.micro_batch if operation is not None else 0
    learning = [number for number, one in enumerate(passes) if _learns(one)]
    for number in sorted(learning, key=lambda n: (n != first, n)):
        found = norms[number] = Norms()
        with _survived(f"micro-batch {number} for its samples", budget, troubles):
            measure(root, passes[number], budget, found)
        notes += found.notes
        if budget.is_over():
            break
    samples = list(_named(norms, passes, scale))
    complete = all(
        number in norms and len(norms[number].by_row) == norms[number].batch > 0
        for number in learning
    )
    notes += troubles
    if samples and not complete:
        notes.append(
            f"the gradients of {len(samples)} samples were taken, not of all: no shares are given"
        )
    if all_broken(samples):
        notes.append(f"the gradients of all {len(samples)} samples are not finite: none stands out")
    return ranked(samples, complete=complete, most=most)


def _named(
    norms: Mapping[int, Norms], passes: Sequence[RecordedCall], scale: float
) -> Iterator[GuiltySample]:
    """Every measured sample, as one of this rank's."""
    for number, found in sorted(norms.items()):
        ids = passes[number].sample_ids
        for row, norm in sorted(found.by_row.items()):
            yield GuiltySample(
                row, None if ids is None else ids[row], number, rank(), norm / scale, None
            )


def _learns(one: RecordedCall) -> bool:
    """False for a call that no gradient came back to, such as one without autograd."""
    return one.output_gradients is None or any(
        gradient is not None for gradient in one.output_gradients
    )


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
