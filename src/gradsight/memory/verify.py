# mypy: allow-untyped-calls
"""A plain step against a checkpointed one: what memory it saves, what it costs, and whether
anything else changed.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradsight.core.random_state import randomness_kept
from gradsight.errors import GradsightError
from gradsight.memory.apply import apply_checkpointing
from gradsight.memory.available import refuse_what_does_not_fit
from gradsight.memory.blocks import find_blocks
from gradsight.memory.causes import Evidence, likely_cause
from gradsight.memory.divergence import Locator
from gradsight.memory.peak import measure_peak_memory
from gradsight.memory.policy import parse_policy
from gradsight.memory.snapshot import Differences, Snapshot, compare, seed_everything, take
from gradsight.memory.workload import Build, Workload, backward, call_build, make_optimizer, warm_up
from gradsight.values.memory import CheckpointingPlan, CheckpointingReport, MemoryUse


@dataclass(frozen=True, slots=True)
class Outcome:
    """One measured step: what it took and what it left behind."""

    use: MemoryUse
    snapshot: Snapshot


def verify_checkpointing(
    build: Build,
    *,
    policy: str | CheckpointingPlan = "full",
    optimizer: str | None = "adamw",
    blocks: Sequence[str] | None = None,
) -> CheckpointingReport:
    """Run the same step plain and checkpointed, from the same seeds, and compare everything.

    build() is called once for each run and must make the same model and batch each time it is
    called with the same seeds.
    """
    if isinstance(policy, CheckpointingPlan):
        blocks, policy = blocks or policy.blocks, policy.policy
    with randomness_kept():
        workload = _built(build, policy, blocks)
        refuse_what_does_not_fit(build, optimizer, workload.model)
        plain = _run(workload, optimizer)
        del workload
        try:
            other = _run(_built(build, policy, blocks), optimizer, policy, blocks)
        except GradsightError:
            raise
        except Exception as error:
            return _raised(build, policy, blocks, plain, error)
        differences = compare(plain.snapshot, other.snapshot)
        report = CheckpointingReport(
            policy, plain.use, other.use, gradients_identical=not differences
        )
        return (
            _explained(report, differences, build, blocks, optimizer, plain)
            if differences
            else report
        )


def _built(build: Build, policy: str, blocks: Sequence[str] | None) -> Workload:
    """The workload from fixed seeds; a policy that does not fit the model is refused before
    anything runs.
    """
    gc.collect()
    seed_everything()
    workload = call_build(build)
    parse_policy(policy, len(find_blocks(workload.model, blocks)))
    return workload


def _run(
    workload: Workload,
    optimizer: str | None,
    policy: str | None = None,
    blocks: Sequence[str] | None = None,
) -> Outcome:
    """Measure forward and backward, take the snapshot, then measure the optimizer's step: copies
    never count.
    """
    if policy is not None:
        apply_checkpointing(workload.model, policy, blocks=blocks)
    made = make_optimizer(optimizer, workload.model)
    warm_up(made)
    seed_everything()
    losses: list[torch.Tensor] = []
    use = measure_peak_memory(lambda: losses.append(backward(workload)))
    snapshot = take(workload.model, losses[0])
    if made is None:
        return Outcome(use, snapshot)
    state = sum(
        t.numel() * t.element_size()
        for s in made.state.values()
        for t in s.values()
        if torch.is_tensor(t)
    )
    return Outcome(_larger(_with_state(use, state), measure_peak_memory(made.step)), snapshot)


def _with_state(use: MemoryUse, state: int) -> MemoryUse:
    """Forward and backward do not touch the optimizer's state, but it is there; CUDA's allocator
    counts it already.
    """
    if use.device == "cuda":
        return use
    by_kind = {**use.by_kind, "optimizer": state}
    return MemoryUse(use.peak_bytes + state, by_kind, use.device, flops=use.flops, notes=use.notes)


def _larger(step: MemoryUse, update: MemoryUse) -> MemoryUse:
    """The peak of both parts of a step, with the work of both."""
    top = max(step, update, key=lambda use: use.peak_bytes)
    return MemoryUse(
        top.peak_bytes, top.by_kind, top.device, flops=step.flops + update.flops, notes=step.notes
    )


def _explained(
    report: CheckpointingReport,
    differences: Differences,
    build: Build,
    blocks: Sequence[str] | None,
    optimizer: str | None,
    plain: Outcome,
) -> CheckpointingReport:
    """The report with the first difference, the module behind it, and the likely cause."""
    guilty = _locate(build, report.policy, blocks)
    again = _built(build, report.policy, blocks)
    reproducible = not compare(plain.snapshot, _run(again, optimizer).snapshot)
    evidence = Evidence(again.model, differences, guilty, reproducible=reproducible)
    where = f"; recomputed differently in {guilty}" if guilty else ""
    return CheckpointingReport(
        report.policy,
        report.baseline,
        report.optimized,
        gradients_identical=False,
        first_difference=differences.first() + where,
        cause=likely_cause(evidence),
    )


def _raised(
    build: Build, policy: str, blocks: Sequence[str] | None, plain: Outcome, error: Exception
) -> CheckpointingReport:
    """A checkpointed step that raises where the plain one did not is a difference too; it saved
    nothing.
    """
    evidence = Evidence(
        _built(build, policy, blocks).model, Differences(False, (), (), ()), error=str(error)
    )
    lines = str(error).strip().splitlines() or [""]
    return CheckpointingReport(
        policy,
        plain.use,
        plain.use,
        gradients_identical=False,
        first_difference=f"the checkpointed step raised {type(error).__name__}: {lines[0]}",
        cause=likely_cause(evidence),
    )


def _locate(build: Build, policy: str, blocks: Sequence[str] | None) -> str | None:
    """Run the checkpointed step once more and find the module that is not the same the second time."""
    workload = _built(build, policy, blocks)
    apply_checkpointing(workload.model, policy, blocks=blocks)
    seed_everything()
    with Locator(find_blocks(workload.model, blocks)) as locator:
        backward(workload)
    return locator.guilty
