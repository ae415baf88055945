# mypy: allow-untyped-calls
"""One observed training pass: from entering observe() to leaving it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core.beside import eager, without_collectives
from gradsight.core.calls import suspended
from gradsight.core.function_modes import end_mode, take_off_ended
from gradsight.core.guard import Guard, entry
from gradsight.core.moments import listen
from gradsight.core.passes import BackwardPass
from gradsight.core.samples import NotSeparable, SplitCall, find_samples, tensors_in
from gradsight.errors import GradsightError
from gradsight.ghost.arguments import NOT_SCORED
from gradsight.ghost.by_sample import TrainingPass, scores_by_sample
from gradsight.ghost.first_block_check import FirstBlockCheck
from gradsight.ghost.one_pass import OnePass
from gradsight.ghost.one_pass_check import compare_rehearsal, rehearse
from gradsight.ghost.parameters import ScoredParameters
from gradsight.ghost.refusals import refuse_batch_norm
from gradsight.ghost.row_parts import RowParts
from gradsight.ghost.selfcheck import rounding
from gradsight.ghost.tracer import TraceOptions, Tracer
from gradsight.ghost.tracing import paused, recompute_seen


@dataclass(frozen=True, slots=True)
class Expected:
    """What the caller says of the samples to come."""

    size: int | None = None
    """How many there are; None: as many as the model is called with."""
    batch_dim: int | None = None
    """The dimension of the model's inputs that holds them; None: to be found."""


def block_guard() -> Guard:
    """Return a guard that puts back what an observed block has changed."""
    return Guard(None, "engine", "an observed block was not put back completely", GradsightError)


class Observation:
    """Traces the operations between `start` and `stop`, also those that checkpointing repeats."""

    def __init__(
        self,
        parameters: ScoredParameters,
        options: TraceOptions,
        expected: Expected,
        check: FirstBlockCheck | None = None,
        guard: Guard | None = None,
    ) -> None:
        """`check` is called before the model's first call. It is None in passes outside training.

        Closing the guard puts back what `start` changed. Without one, a new guard is made.
        """
        self._guard = guard or block_guard()
        self.stop = self._guard.close
        self.tracer = Tracer(options, parameters.name)
        self.tracer.guard = self._guard
        self.calls: list[SplitCall] = []
        self.scale: Tensor | None = None
        """The factor that a GradScaler gave the loss; None without one."""
        self.passes_back = 0
        """Those that came through the model."""
        self.on_finished: Callable[[], None] | None = None
        """Called when a backward pass through the model has returned."""
        self.began_backward = False
        """Whether there was one, of whatever model."""
        self.passes_by_sample: str | None = None
        """Why each sample has had a backward pass of its own; None where none has."""
        self._tables: list[Tensor] = []
        """The scores that such passes have found, one table for each backward pass."""
        self._parameters = parameters
        self._root = parameters.root
        self._expected = expected
        self._check = check
        self._stack = ExitStack()
        self._eyes = ExitStack()
        self._looking = False
        self._rehearsed: list[Tensor] | None = None
        self._hook: Any = None
        self._busy = False

    def start(self) -> None:
        """Begin to observe; `stop` must follow, also if this fails."""
        refuse_batch_norm(self._root)
        self._guard.faults = 0
        self._guard.at_end(self._close_eyes)
        self._guard.at_end(self._stack.close)
        # Inside of an operation that is refused, torch puts the mode back once more.
        self._stack.callback(setattr, self.tracer, "is_over", True)
        listen(self, self._guard, own_thread=True)
        before = self._root.register_forward_pre_hook(
            self._before_root, with_kwargs=True, prepend=True
        )
        self._stack.callback(before.remove)
        # always_call: a refusal inside of the model ends the block before the user hears it.
        after = self._root.register_forward_hook(self._after_root, always_call=True)
        self._stack.callback(after.remove)
        if self._expected.size is not None:
            self._set_probe(self._expected.size)
        self.tracer.mark_model(self._root)
        self._stack.enter_context(recompute_seen(self.tracer, self._root))
        # A compiled model ignores hooks that are put on later, and says nothing.
        self._eyes.enter_context(eager())
        take_off_ended()
        self.tracer.__enter__()
        self._looking = True

    def look_away(self) -> None:
        """The forward pass is over: operations that come now are not this block's."""
        self._close_eyes()
        if self.tracer.expects_recompute:
            self._stack.enter_context(eager())

    def _close_eyes(self) -> None:
        self._eyes.close()
        if self._looking:
            end_mode(self.tracer)
            self._looking = False

    def judge(self, loss: Tensor) -> None:
        """The forward pass is over: refuse a loss that mixes samples."""
        guard = self.tracer.options.guard
        if guard is not None:
            if guard.judges_loss and self.tracer.bound:
                with paused(self.tracer):
                    guard.judge_loss(loss, self.tracer.batch)
            guard.before_backward(loss, keeps_outputs=self.tracer.needs_passes_by_sample)

    def refuse_unsplit(self, loss: Tensor) -> None:
        """An error if a loss was not split by rows in this pass."""
        guard = self.tracer.options.guard
        assert guard is not None
        guard.before_backward(loss)

    @property
    def dropped_out(self) -> bool:
        """Whether a pass over joined rows met an active dropout."""
        guard = self.tracer.options.guard
        return guard is not None and guard.joined is not None and guard.joined.dropped_out

    def release(self) -> None:
        """Let go of every tensor of the pass."""
        self.calls.clear()
        self._tables.clear()
        if self.tracer.options.guard is not None:
            self.tracer.options.guard.forget_outputs()
        if self._hook is not None:
            self._hook.remove()
        self.tracer.release()

    @entry(NOT_SCORED)
    def before_backward(self, begun: BackwardPass) -> None:
        """A backward pass begins: the last moment at which samples can be scored one by one."""
        self.began_backward = True
        if self.tracer.needs_passes_by_sample and self.calls:
            self.score_by_sample(tensors_in(begun.tensors), begun.seeds)

    def score_by_sample(self, losses: Sequence[Tensor], seeds: Any = None) -> Tensor | None:
        """The scores [slots, B], by a backward pass for each sample; the graph stays as it is."""
        guard = self.tracer.options.guard
        assert guard is not None
        if self._parameters.sharded:
            raise GradsightError(
                f"this model cannot be scored under fully_shard, because {self.tracer.unscored}. "
                "Outside of it, such a batch is scored by one backward pass per sample: use "
                "DistributedDataParallel, or train without GhostEngine."
            )
        given = None if seeds is None else tensors_in(seeds)
        seen = [*guard.outputs, *guard.loss_inputs]
        training = TrainingPass(self.calls, seen, losses, given)
        with suspended(), without_collectives():
            # Where activation checkpointing runs the pass again, it is seen as it was at first.
            table = scores_by_sample(
                training,
                self._parameters,
                self.tracer.options.directions,
                rounding(self._parameters),
                paused(self.tracer),
            )
        if table is not None:
            self._tables.append(table)
            self.passes_by_sample = self.passes_by_sample or self.tracer.unscored
            guard.forget_outputs()
        return table

    @entry(NOT_SCORED)
    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """Remember the factor, as a tensor of its own: the scaler changes its own in place."""
        with suspended(), torch._C.DisableTorchFunction():
            self.scale = scaler.scale(torch.ones((), device=self._parameters.device))
        if self._one_pass is not None:
            self._one_pass.loss_scale = self.scale

    @entry(NOT_SCORED)
    def after_backward(self, begun: object, rows: object) -> None:
        """A backward pass has returned."""
        if self.on_finished is not None and self.backwards:
            self.on_finished()

    def scores(self) -> Tensor:
        """The table [slots, B], loss scale divided out, not yet the share of the global batch."""
        if not self.tracer.bound and not self.began_backward:
            raise GradsightError(
                "observe() ended without a call of the model: expected loss_fn(model, batch) and "
                "loss.backward() inside the block"
            )
        if self.backwards == 0 and self.began_backward and not self.calls:
            raise GradsightError(
                "there was a backward pass in this block, but the model that GhostEngine was "
                f"given ({type(self._root).__name__}) was not called: expected "
                "loss_fn(model, batch) with that very model, not with another or with a copy of "
                "it. If loss_fn calls parts of the model, put what it calls into the forward of "
                "one module, and give that to GhostEngine. Nothing of this block is scored."
            )
        if self.backwards != 1:
            came = "without a backward pass"
            if self.backwards > 1:
                came = f"after {self.backwards} backward passes"
            raise GradsightError(
                f"observe() ended {came}: expected exactly one loss.backward() inside each block. "
                "Use one block per micro-batch, and use_reentrant=False for activation "
                "checkpointing. The scores of this block are discarded; Gradsight did not change "
                ".grad."
            )
        table = self._table()
        if self.scale is not None:
            table = table / self.scale.to(table)
        return table

    def _table(self) -> Tensor:
        """The scores as the backward pass has left them."""
        if self._tables:
            return self._tables[0]
        probe = self.tracer.probe
        table = torch.zeros_like(probe) if probe.grad is None else probe.grad
        if self._one_pass is not None:
            self._one_pass.finish()
            if self._one_pass.table is not None:
                table = table + self._one_pass.table.to(table)
            if self.scale is not None:
                # The targets' losses were pulled back with the same factor.
                table = table / self.scale.to(table)
        return table

    @property
    def backwards(self) -> int:
        """How many backward passes came through the model."""
        if self._one_pass is not None:
            return self._one_pass.backwards
        if self.tracer.needs_passes_by_sample:
            return len(self._tables)
        return self.passes_back

    @property
    def _one_pass(self) -> OnePass | None:
        return self.tracer.options.one_pass

    def _set_probe(self, batch: int) -> None:
        if self._one_pass is not None:
            batch = self._one_pass.parts.train
        probe = torch.zeros(
            self.tracer.options.directions.slots,
            batch,
            device=self._parameters.device,
            dtype=self._parameters.score_dtype,
            requires_grad=True,
        )
        self._hook = probe.register_post_accumulate_grad_hook(self._count)
        self.tracer.probe = probe

    def _count(self, probe: Tensor) -> None:
        self.passes_back += 1

    @entry(NOT_SCORED)
    def _before_root(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._busy or self.tracer.looks_away or not self.tracer.active:
            return
        self._busy = True  # the check calls the model too
        try:
            self._take_call(args, kwargs)
        finally:
            self._busy = False

    def backward_failed(self, begun: object) -> None:
        """A backward pass broke off: nothing of it can be scored."""
        if self.on_finished is not None and self.began_backward:
            self._guard.close()
            self.release()

    def _take_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch._C.DisableTorchFunction():
            call = self._split(args, kwargs)
        if not self.calls:
            self.tracer.options.memory.preferred = next(iter(call.dims.values()))
        if self._check is not None:
            self._prove(call, self._check)
        if not self.calls:
            if self._expected.size is None:
                self._set_probe(call.batch)
        elif call.batch != self.tracer.batch:
            raise GradsightError(
                f"the model was called with {call.batch} samples after {self.tracer.batch} in the "
                "same block. Use one observe() block per backward pass, or pass sample_ids."
            )
        self.calls.append(call)
        self.tracer.mark_call(call)
        if self.tracer.options.guard is not None:
            self.tracer.options.guard.inside_model = True

    def _prove(self, call: SplitCall, check: FirstBlockCheck) -> None:
        """Before a call with new shapes, check that fast scores and one pass are right for it."""
        one_pass = self._one_pass
        # Sharded models have to run in step: the training rows alone are run in the first block.
        is_new = check.first
        if one_pass is not None and not self._parameters.sharded:
            is_new = check.is_new(call, self._parameters, one_pass.parts.sizes)
        reason = check.before_call(call, self._parameters, self.tracer)
        if reason is not None:
            self.tracer.unscored = self.tracer.unscored or reason
            # Later calls of the same pass stay as the first: checkpointing may repeat them all.
            self.tracer.runs_plain |= not self.calls
        if one_pass is not None and is_new:
            with paused(self.tracer):
                self._rehearsed = self._alone(call, one_pass.parts)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitCall:
        """Find the samples in the arguments, or say what the user can do."""
        expected = self._expected
        try:
            return find_samples(args, kwargs, expected.size, expected.batch_dim, self._root)
        except NotSeparable as error:
            raise GradsightError(
                f"{error} Check sample_ids, or pass batch_dim to GhostEngine."
            ) from None

    def _alone(self, call: SplitCall, parts: RowParts) -> list[Tensor]:
        return rehearse(self._root, call, parts, sharded=self._parameters.sharded)

    @entry(NOT_SCORED)
    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        guard = self.tracer.options.guard
        if guard is not None and not self._busy:
            guard.inside_model = False
        if guard is None or self._busy or self.tracer.looks_away or not self.tracer.active:
            take_off_ended()  # a refusal inside of the model: here torch has let go of the mode
            return
        if self._rehearsed is not None and self._one_pass is not None and output is not None:
            alone = self._rehearsed
            self._rehearsed = None
            limit = rounding(self._parameters)
            compare_rehearsal(alone, tensors_in(output), self._one_pass.parts, limit)
        if guard.joined is not None:
            guard.joined.refuse_picked_rows(self.tracer, tensors_in(output))
        guard.outputs += tensors_in(output)
