"""One observed training pass: from entering observe() to leaving it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradsight.errors import GradsightError
from gradsight.ghost.parameters import Parameters
from gradsight.ghost.passes import ModelCall, eager, tell_batch, tensors_in
from gradsight.ghost.tracer import Tracer, tracing


class Observation:
    """Traces the operations between entering and leaving, also those that activation checkpointing
    repeats.
    """

    def __init__(
        self,
        root: nn.Module,
        parameters: Parameters,
        tracer: Tracer,
        slots: int,
        size: int | None,
        batch_dim: int | None,
        before_call: Callable[[ModelCall], None],
    ) -> None:
        self.tracer = tracer
        self.calls: list[ModelCall] = []
        self.outputs: list[Tensor] = []
        self.scales: list[Tensor] = []
        self.backwards = 0
        self._root, self._parameters, self._slots = root, parameters, slots
        self._size, self._batch_dim, self._before_call = size, batch_dim, before_call
        self._stack = ExitStack()
        self._hook: Any = None
        self._busy = False

    def start(self) -> None:
        """Begin to look; `stop` must follow."""
        refuse_batch_norm(self._root)
        try:
            self._stack.enter_context(eager())
            self._stack.enter_context(watching_scale(self.scales))
            hooks = (
                self._root.register_forward_pre_hook(
                    self._before_root, with_kwargs=True, prepend=True
                ),
                self._root.register_forward_hook(self._after_root),
            )
            for hook in hooks:
                self._stack.callback(hook.remove)
            if self._size is not None:
                self._set_probe(self._size)
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
        self.outputs.clear()
        if self._hook is not None:
            self._hook.remove()
        self.tracer.release()

    def scores(self) -> Tensor:
        """The table [slots, B] of this pass: loss scale divided out, not yet the share of the
        global batch.
        """
        if not self.tracer.bound:
            raise GradsightError(
                "observe() ended without a call of the model: expected loss_fn(model, batch) and loss.backward() "
                "inside the block"
            )
        if self.backwards != 1:
            came = (
                "without a backward pass"
                if self.backwards == 0
                else f"after {self.backwards} backward passes"
            )
            raise GradsightError(
                f"observe() ended {came}: expected exactly one loss.backward() inside each block (one block per micro-batch; "
                "activation checkpointing with use_reentrant=False). The scores of this block are discarded; .grad is "
                "untouched."
            )
        table = self.tracer.probe.grad
        assert table is not None
        return table / self.scales[-1].to(table) if self.scales else table

    def _set_probe(self, batch: int) -> None:
        probe = torch.zeros(
            self._slots,
            batch,
            device=self._parameters.device,
            dtype=self._parameters.score_dtype,
            requires_grad=True,
        )
        self._hook = probe.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
        self.tracer.probe = probe

    def _count(self, probe: Tensor) -> None:
        self.backwards += 1

    def _before_root(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._busy or self.tracer.paused or not self.tracer.active:
            return
        self._busy = True
        try:
            with torch._C.DisableTorchFunction():
                call = tell_batch(args, kwargs, self._size, self._batch_dim, self._root)
            if not self.calls:
                self.tracer.plan.memory.preferred = next(iter(call.dims.values()))
                self._before_call(call)
                if self._size is None:
                    self._set_probe(call.batch)
            elif call.batch != self.tracer.batch:
                raise GradsightError(
                    f"the model was called with {call.batch} samples after {self.tracer.batch} in the same block. "
                    "Use one observe() block per backward pass, or pass sample_ids."
                )
            self.calls.append(call)
            self.tracer.mark_call(call)
        finally:
            self._busy = False

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._busy and not self.tracer.paused and self.tracer.active:
            self.outputs += tensors_in(output)


@contextmanager
def watching_scale(found: list[Tensor]) -> Iterator[None]:
    """Append to `found` the factor of every loss that a GradScaler scales in here."""
    original = torch.amp.GradScaler.scale

    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if isinstance(outputs, Tensor):
            found.append(original(self, torch.ones((), device=outputs.device)))
        return scaled

    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.amp.GradScaler.scale = original  # type: ignore[method-assign]


def refuse_batch_norm(root: nn.Module) -> None:
    """An error if a BatchNorm of the model is in training mode."""
    for name, module in root.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise GradsightError(
                f"{name or 'the model'} is a {type(module).__name__} in training mode: its statistics mix the samples "
                "of a batch, so no "
                "sample has a gradient of its own. Put it in evaluation mode, or use GroupNorm or LayerNorm."
            )


def refuse_mixing(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """An error for batch statistics computed by a function call."""
    if func is F.batch_norm and kwargs.get("training", args[5] if len(args) > 5 else False):
        raise GradsightError(
            "batch_norm is called with training=True: its statistics mix the samples of a batch, so no sample has a "
            "gradient of its own"
        )


def mixes_samples(loss: Tensor, outputs: Sequence[Tensor], batch: int) -> bool:
    """Whether the loss ties samples together: whether the gradient at one sample's output depends
    on another's output.

    Looked for with one second derivative of the loss as a function of the model's outputs. A loss
    that cannot be differentiated twice is given the benefit of the doubt.
    """
    rows = [y for y in outputs if y.requires_grad and y.dim() > 0 and y.shape[0] == batch]
    if batch < 2 or not rows:
        return False
    try:
        first = torch.autograd.grad(loss, rows[:1], create_graph=True, allow_unused=True)[0]
        if first is None or not first.requires_grad:
            return False
        even = torch.zeros_like(first)
        even[::2] = torch.randn(even[::2].shape, generator=torch.Generator().manual_seed(0)).to(
            even
        )
        second = torch.autograd.grad(first, rows[0], even, retain_graph=True, allow_unused=True)[0]
    except RuntimeError:
        return False
    if second is None:
        return False
    own, foreign = second[::2].abs().max(), second[1::2].abs().max()
    return bool(foreign > 1e-4 * own) and bool(foreign > 0)
