# mypy: allow-untyped-calls
"""One observed training pass: from entering observe() to leaving it."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core.beside import eager
from gradsight.core.calls import suspended
from gradsight.core.guard import Guard
from gradsight.core.moments import listen
from gradsight.core.samples import NotSeparable, SplitCall, find_samples, tensors_in
from gradsight.errors import GradsightError
from gradsight.ghost.first_block_check import FirstBlockCheck
from gradsight.ghost.parameters import ScoredParameters
from gradsight.ghost.refusals import refuse_batch_norm
from gradsight.ghost.tracer import TraceOptions, Tracer, tracing


@dataclass(frozen=True, slots=True)
class Expected:
    """What the caller says of the samples to come."""

    size: int | None = None
    """How many there are; None: as many as the model is called with."""
    batch_dim: int | None = None
    """The dimension of the model's inputs that holds them; None: to be found."""


class Observation:
    """Traces the operations between `start` and `stop`, also those that checkpointing repeats."""

    def __init__(
        self,
        parameters: ScoredParameters,
        options: TraceOptions,
        expected: Expected,
        check: FirstBlockCheck | None = None,
    ) -> None:
        """`check` is asked before the model is first called; None in passes beside training."""
        self.tracer = Tracer(options, parameters.name)
        self.calls: list[SplitCall] = []
        self.scale: Tensor | None = None
        """The factor that a GradScaler gave the loss; None without one."""
        self.backwards = 0
        """Those that came through the model."""
        self.began_backward = False
        """Whether there was one, of whatever model."""
        self._parameters = parameters
        self._root = parameters.root
        self._expected = expected
        self._check = check
        self._stack = ExitStack()
        self._hook: Any = None
        self._busy = False

    def start(self) -> None:
        """Begin to look; `stop` must follow."""
        refuse_batch_norm(self._root)
        try:
            # A compiled model ignores hooks that are put on later, and says nothing.
            self._stack.enter_context(eager())
            # What the engine refuses, the user hears in their own block: everything passes.
            guard = Guard(None, "engine", "the block was not observed", Exception)
            listen(self, guard, own_thread=True)
            self._stack.callback(guard.close)
            before = self._root.register_forward_pre_hook(
                self._before_root, with_kwargs=True, prepend=True
            )
            self._stack.callback(before.remove)
            after = self._root.register_forward_hook(self._after_root)
            self._stack.callback(after.remove)
            if self._expected.size is not None:
                self._set_probe(self._expected.size)
            self.tracer.mark_constant(self._root.buffers())
            self._stack.enter_context(tracing(self.tracer, self._root))
        except BaseException:
            self._stack.close()
            raise

    def stop(self) -> None:
        """Leave everything as it was found."""
        self._stack.close()

    def release(self) -> None:
        """Let go of every tensor of the pass."""
        self.calls.clear()
        if self.tracer.options.guard is not None:
            self.tracer.options.guard.outputs.clear()
        if self._hook is not None:
            self._hook.remove()
        self.tracer.release()

    def before_backward(self, tensors: object) -> None:
        """A backward pass begins."""
        self.began_backward = True

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """Remember the factor, as a tensor of its own: the scaler changes its own in place."""
        with suspended(), torch._C.DisableTorchFunction():
            self.scale = scaler.scale(torch.ones((), device=self._parameters.device))

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
                "it. Nothing of this block is scored; training can go on without observe()."
            )
        if self.backwards != 1:
            came = "without a backward pass"
            if self.backwards > 1:
                came = f"after {self.backwards} backward passes"
            raise GradsightError(
                f"observe() ended {came}: expected exactly one loss.backward() inside each block "
                "(one block per micro-batch; activation checkpointing with use_reentrant=False). "
                "The scores of this block are discarded; .grad is untouched."
            )
        table = self.tracer.probe.grad
        assert table is not None
        if self.scale is not None:
            table = table / self.scale.to(table)
        return table

    def _set_probe(self, batch: int) -> None:
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
        self.backwards += 1

    def _before_root(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._busy or self.tracer.paused or not self.tracer.active:
            return
        self._busy = True  # the check calls the model too
        try:
            self._take_call(args, kwargs)
        finally:
            self._busy = False

    def _take_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch._C.DisableTorchFunction():
            call = self._split(args, kwargs)
        if not self.calls:
            self.tracer.options.memory.preferred = next(iter(call.dims.values()))
            if self._check is not None:
                self._check.before_call(call, self._parameters, self.tracer)
            if self._expected.size is None:
                self._set_probe(call.batch)
        elif call.batch != self.tracer.batch:
            raise GradsightError(
                f"the model was called with {call.batch} samples after {self.tracer.batch} in the "
                "same block. Use one observe() block per backward pass, or pass sample_ids."
            )
        self.calls.append(call)
        self.tracer.mark_call(call)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitCall:
        """Find the samples in the arguments, or say what the user can do."""
        expected = self._expected
        try:
            return find_samples(args, kwargs, expected.size, expected.batch_dim, self._root)
        except NotSeparable as error:
            raise GradsightError(
                f"{error} Check sample_ids, or pass batch_dim to GhostEngine."
            ) from None

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        guard = self.tracer.options.guard
        if guard is None or self._busy or self.tracer.paused or not self.tracer.active:
            return
        guard.outputs += tensors_in(output)
