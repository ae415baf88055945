# mypy: allow-untyped-calls
"""A training pass that stays in compiled code while it is scored."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core.calls import suspended
from gradsight.core.function_modes import end_mode, take_off_ended
from gradsight.core.guard import Guard
from gradsight.core.moments import listen
from gradsight.errors import GradsightError
from gradsight.ghost.compiled_mode import TraceableMode
from gradsight.ghost.compiled_plan import PassPlan, Probes, Shapes, shapes_of
from gradsight.ghost.one_pass import OnePass, OnePassRefusal


class CompiledObservation:
    """One training pass in compiled code: what `Observation` is to an eager one."""

    def __init__(self, plan: PassPlan, one_pass: OnePass | None) -> None:
        self.scale: Tensor | None = None
        self.on_finished: Callable[[], None] | None = None
        self.on_refusal: Callable[[], None] | None = None
        self.passes_back = 0
        self.sizes_by_call: Callable[[Shapes], tuple[int, ...] | None] | None = None
        """Asked when the model is called, where nobody said with what: None for a new call."""
        self.on_new_call: Callable[[], None] | None = None
        """Called where the model is called with what compiled code was not compared on."""
        self._plan = plan
        self._one_pass = one_pass
        self._mode: TraceableMode | None = None
        self._probes: Probes | None = None
        self._counts: list[int] = []
        self._stack = ExitStack()
        self._looking = False

    def start(self, model: nn.Module, sizes: tuple[int, ...] | None) -> None:
        """Begin to look; `stop` must follow. Without sizes they are found at the model's call."""
        guard = Guard(None, "engine", "the block was not observed", Exception)
        listen(self, guard, own_thread=True)
        self._stack.callback(guard.close)
        self._see_calls(model)
        if sizes is not None:
            self._open_eyes(sizes)

    def _open_eyes(self, sizes: tuple[int, ...]) -> None:
        self._mode = self._plan.mode(sizes)
        self._probes = self._plan.probes(sizes[0])
        self._counts = [0] * len(self._probes.leaves)
        for number, leaf in enumerate(self._probes.leaves):
            hook = leaf.register_post_accumulate_grad_hook(partial(self._count, number))
            self._stack.callback(hook.remove)
        self._stack.enter_context(self._plan.marked(self._probes))
        take_off_ended()
        self._mode.__enter__()
        self._looking = True

    def _see_calls(self, model: nn.Module) -> None:
        """Hear of the model's call before compiled code runs, and of its failure."""
        inner = getattr(model, "_compiled_call_impl", None)
        if inner is None:
            before = model.register_forward_pre_hook(self._before_call, with_kwargs=True)
            self._stack.callback(before.remove)
            after = model.register_forward_hook(self._after_call, always_call=True)
            self._stack.callback(after.remove)
            return

        # Hooks of a model that was compiled in place are compiled with it: too late for us.
        def call(*args: Any, **kwargs: Any) -> Any:
            self._before_call(model, args, kwargs)
            output = None
            try:
                # Looked up again: the block may go on eagerly from here.
                output = inner(*args, **kwargs)
            finally:
                self._after_call(model, args, output)
            return output

        object.__setattr__(model, "_compiled_call_impl", call)
        self._stack.callback(object.__setattr__, model, "_compiled_call_impl", inner)

    def _before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._looking or self.sizes_by_call is None:
            return
        sizes = self.sizes_by_call(shapes_of(args, kwargs))
        if sizes is not None:
            self._open_eyes(sizes)
        elif self.on_new_call is not None:
            self.on_new_call()

    def _after_call(self, module: nn.Module, args: Any, output: Any) -> None:
        if output is None and self._looking and self.on_refusal is not None:
            self.on_refusal()

    def look_away(self) -> None:
        """The forward pass is over."""
        if self._looking and self._mode is not None:
            self._looking = False
            end_mode(self._mode)

    def judge(self, loss: Tensor) -> None:
        """The forward pass is over: refuse a loss that was not split."""
        if self._mode is not None:
            self._mode.refuse_unsplit(loss)

    def stop(self) -> None:
        """Leave everything as it was found."""
        self.look_away()
        self._stack.close()

    def release(self) -> None:
        """Let go of every tensor of the pass."""
        self._mode = None
        self._probes = None

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """Remember a GradScaler's factor."""
        with suspended(), torch._C.DisableTorchFunction():
            self.scale = scaler.scale(torch.ones((), device=self._plan.parameters.device))
        if self._one_pass is not None:
            self._one_pass.loss_scale = self.scale

    def after_backward(self, begun: object, rows: object) -> None:
        """A backward pass has returned."""
        if self.on_finished is not None and self.passes_back:
            self.on_finished()

    def backward_failed(self, begun: object) -> None:
        """A backward pass broke off."""
        if self.on_refusal is not None:
            self.on_refusal()

    def scores(self) -> Tensor:
        """The table [slots, B], loss scale divided out."""
        if self._probes is None or self.passes_back != 1:
            raise GradsightError(
                f"expected exactly one loss.backward() for each block, got {self.passes_back}. The "
                "scores of this block are discarded; .grad is untouched."
            )
        self._take_losses()
        table = self._probes.table([leaf.grad for leaf in self._probes.leaves])
        if self.scale is not None:
            table = table / self.scale.to(table)
        if self._one_pass is not None:
            table = table / self._seed().to(table)
        return table

    def _seed(self) -> Tensor:
        """What the targets' losses were pulled back with."""
        assert self._mode is not None
        if self._plan.splits_loss:
            return self._mode.seed
        return self._mode.seed.new_ones(()) if self.scale is None else self.scale

    def _take_losses(self) -> None:
        """Where the loss was split in the pass, its mode has the targets' losses."""
        one_pass = self._one_pass
        if one_pass is None or one_pass.losses:
            return
        losses = None if self._mode is None else self._mode.losses
        if losses is None:
            raise OnePassRefusal("one pass found no loss function of torch in the pass.")
        one_pass.losses = dict(zip(one_pass.targets, losses, strict=True))

    def _count(self, number: int, probe: Tensor) -> None:
        self._counts[number] += 1
        self.passes_back = max(self._counts)
