# mypy: allow-untyped-calls
"""A plain step against a checkpointed one: memory, extra work, and whether all else is the same."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from gradsight.core.random_state import randomness_kept
from gradsight.core.torch_names import refuse_unknown_torch
from gradsight.errors import GradsightError, UsageError
from gradsight.memory.apply import apply_checkpointing
from gradsight.memory.blocks import blocks_meant, find_blocks
from gradsight.memory.called_blocks import blocks_of
from gradsight.memory.causes import Evidence, likely_cause
from gradsight.memory.cuda import is_cuda
from gradsight.memory.differences import (
    DivergenceFinder,
    StepDifferences,
    StepSnapshot,
    compare_snapshots,
    seed_everything,
    take_snapshot,
)
from gradsight.memory.given import WrittenInPlace
from gradsight.memory.monitor import available_memory
from gradsight.memory.peak import measure_peak_memory
from gradsight.memory.policy import NONE, parse_policy
from gradsight.memory.predict import predict_peak_memory
from gradsight.memory.workload import (
    Build,
    StepFailed,
    Workload,
    backward,
    call_build,
    make_optimizer,
    state_bytes,
    warm_up,
)
from gradsight.values.memory import CheckpointingPlan, CheckpointingReport, MemoryUse
from gradsight.values.sizes import format_size


def verify_checkpointing(
    build: Build,
    *,
    policy: str | CheckpointingPlan = "full",
    optimizer: str | None = "adamw",
    blocks: Sequence[str] | None = None,
) -> CheckpointingReport:
    """Run the same step plain and checkpointed, from the same seeds, and compare everything.

    build: makes (model, batch) or (model, batch, loss_fn). It is called once for each run, and must
      make the same model and batch each time it is called with the same seeds.
    policy: what is checkpointed, as in `apply_checkpointing`.
    optimizer: its name; None is forward and backward only.
    blocks: the modules that count as blocks, by name or shell pattern; None finds them.
    """
    refuse_unknown_torch("memory")
    if isinstance(policy, CheckpointingPlan):
        blocks = blocks_meant(policy, blocks)
        policy = policy.policy
    with randomness_kept():
        return _Verification(build, policy, optimizer, blocks).report()


@dataclass(frozen=True, slots=True)
class StepEffects:
    """One measured step: what it took and what it left behind."""

    use: MemoryUse
    snapshot: StepSnapshot


@dataclass(frozen=True, slots=True)
class _Verification:
    """The step in question; each of its runs is built anew and starts from the same seeds."""

    build: Build
    policy: str
    optimizer: str | None
    blocks: Sequence[str] | None

    def report(self) -> CheckpointingReport:
        """Run both steps and compare them."""
        workload = self._built()
        refuse_what_does_not_fit(self.build, self.optimizer, workload.model)
        plain = run_step(workload, self.optimizer)
        del workload  # or both models would be in memory at once
        try:
            checkpointed = run_step(self._built(checkpointed=True), self.optimizer)
        except StepFailed as error:
            return self._raised(plain, error.__cause__ or error)
        except WrittenInPlace as error:
            return self._raised(plain, error)
        except GradsightError:
            raise  # a refusal of ours says what to do; it is no difference between the steps
        except Exception as error:
            return self._raised(plain, error)
        differences = compare_snapshots(plain.snapshot, checkpointed.snapshot)
        if differences:
            return self._explained(plain, checkpointed, differences)
        report = CheckpointingReport(
            self.policy, plain.use, checkpointed.use, gradients_identical=True
        )
        return report if report.passed else replace(report, cause=self._nothing_saved())

    def _nothing_saved(self) -> str:
        """Return why the peak may not have gone down, and what to do."""
        if self.policy == str(NONE):
            return f"the policy {self.policy!r} recomputes no block: choose another, such as 'full'"
        return (
            "the blocks keep too little for backward, or one of them needs as much when it is "
            "recomputed as all of them kept. Try a larger batch, or name other blocks with "
            "blocks=[...]; otherwise this model gains nothing from checkpointing"
        )

    def _built(self, *, checkpointed: bool = False) -> Workload:
        """The workload from fixed seeds; a policy that does not fit is refused before any run."""
        # A checkpointed block and its forward refer to each other: only the collector frees them.
        gc.collect()
        seed_everything()
        workload = call_build(self.build)
        if any(parameter.is_meta for parameter in workload.model.parameters()):
            raise UsageError(
                "verify_checkpointing runs the step, and this model is on the meta device, without "
                "any data: build it on the CPU, or use predict_peak_memory"
            )
        blocks = blocks_of(workload, self.blocks)
        parse_policy(self.policy, len(find_blocks(workload.model, blocks)))
        if checkpointed:
            apply_checkpointing(workload.model, self.policy, blocks=blocks)
        return workload

    def _explained(
        self, plain: StepEffects, checkpointed: StepEffects, differences: StepDifferences
    ) -> CheckpointingReport:
        """The report with the first difference, the module behind it, and the likely cause."""
        guilty = self._guilty_module()
        again = self._built()
        snapshot = run_step(again, self.optimizer).snapshot
        reproducible = not compare_snapshots(plain.snapshot, snapshot)
        evidence = Evidence(again.model, differences, guilty, reproducible=reproducible)
        first_difference = differences.first()
        if guilty:
            first_difference += f"; recomputed differently in {guilty}"
        return CheckpointingReport(
            self.policy,
            plain.use,
            checkpointed.use,
            gradients_identical=False,
            first_difference=first_difference,
            cause=likely_cause(evidence),
        )

    def _raised(self, plain: StepEffects, error: BaseException) -> CheckpointingReport:
        """The report on a checkpointed step that raised where the plain one did not.

        That is a difference too, and such a step saved nothing.
        """
        nothing_compared = StepDifferences(loss=False, gradients=(), buffers=(), random=())
        evidence = Evidence(self._built().model, nothing_compared, error=str(error))
        first_line = str(error).strip().partition("\n")[0]
        return CheckpointingReport(
            self.policy,
            plain.use,
            plain.use,
            gradients_identical=False,
            first_difference=f"the checkpointed step raised {type(error).__name__}: {first_line}",
            cause=likely_cause(evidence),
        )

    def _guilty_module(self) -> str | None:
        """Run the checkpointed step once more and find the module that differs the second time."""
        workload = self._built(checkpointed=True)
        blocks = blocks_of(workload, self.blocks)
        seed_everything()
        with DivergenceFinder(find_blocks(workload.model, blocks)) as finder:
            backward(workload)
        return finder.guilty


def run_step(workload: Workload, optimizer: str | None) -> StepEffects:
    """Measure forward and backward, take the snapshot, then measure the optimizer's step.

    In this order the copies in the snapshot never count.
    """
    made_optimizer = make_optimizer(optimizer, workload.model)
    warm_up(made_optimizer)
    seed_everything()
    losses: list[torch.Tensor] = []
    use = measure_peak_memory(lambda: losses.append(backward(workload)))
    snapshot = take_snapshot(workload.model, losses[0])
    if made_optimizer is None:
        return StepEffects(use, snapshot)
    use = _with_state(use, state_bytes(made_optimizer))
    update = measure_peak_memory(made_optimizer.step)
    return StepEffects(_larger(use, update), snapshot)


def _with_state(use: MemoryUse, state: int) -> MemoryUse:
    """The peak with the optimizer's state, which is there although backward does not touch it."""
    if is_cuda(use.device):
        return use  # CUDA's allocator counts it already
    by_kind = {**use.by_kind, "optimizer": state}
    return replace(use, peak_bytes=use.peak_bytes + state, by_kind=by_kind)


def _larger(step: MemoryUse, update: MemoryUse) -> MemoryUse:
    """The peak of both parts of a step, with the work of both."""
    top = max(step, update, key=lambda use: use.peak_bytes)
    return replace(
        step,
        peak_bytes=top.peak_bytes,
        by_kind=top.by_kind,
        device=top.device,
        flops=step.flops + update.flops,
        operator_bytes=None,
    )


def refuse_what_does_not_fit(build: Build, optimizer: str | None, model: nn.Module) -> None:
    """Refuse to run a step on the CPU that would drive the machine out of memory."""
    free = available_memory()
    if free is None or any(p.device.type != "cpu" for p in model.parameters()):
        return
    try:
        needed = predict_peak_memory(build, optimizer=optimizer).peak_bytes
    except GradsightError:
        return  # cannot be predicted; the run itself will tell
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    held = 2 * parameter_bytes  # copies of the gradients, to compare
    if needed + held > free:
        raise GradsightError(
            f"the plain step needs {format_size(needed)}, and {format_size(held)} for the "
            f"comparison; {format_size(free)} is available here. Verify with a smaller batch, or "
            "use predict_peak_memory, which needs no memory"
        )
