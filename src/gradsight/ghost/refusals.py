"""Refusals of passes in which samples have no gradient of their own.

Statistics over the batch mix samples, and so do losses that tie them together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradsight.core.samples import LOSSES
from gradsight.errors import GradsightError
from gradsight.ghost.joined_calls import JoinedCalls, refuse_other_terms
from gradsight.ghost.one_pass import OnePassRefusal
from gradsight.ghost.use import DECLINED, argument_of

if TYPE_CHECKING:
    from gradsight.ghost.tracer import Tracer


class PassGuard:
    """Asked before every operation of a training pass, and before its backward pass."""

    def __init__(self, joined: JoinedCalls | None, *, judges_loss: bool) -> None:
        self.judges_loss = judges_loss
        """Whether the loss is looked at: in the first block only, for a second derivative of it
        costs a backward pass.
        """
        self.outputs: list[Tensor] = []
        """The model's outputs, until the backward pass begins."""
        self.loss_inputs: list[Tensor] = []
        """What loss functions were given inside of the model, likewise."""
        self.inside_model = False
        self.joined = joined
        """Told of every operation in a pass over joined rows."""

    def intercept(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tracer: "Tracer",
    ) -> Any:
        """A replaced call's result, or DECLINED; an error if the call mixes samples."""
        if func is F.batch_norm:
            refuse_batch_statistics(args, kwargs)
        if self.inside_model and func in LOSSES:
            self.loss_inputs.append(argument_of(args, kwargs, 0, "input", None))
        if self.joined is None:
            return DECLINED
        return self.joined.intercept(func, args, kwargs, tracer)

    def judge_loss(self, loss: Tensor, batch: int) -> None:
        """An error if the loss ties samples together."""
        with torch.enable_grad():
            mixed = mixes_samples(loss, self.outputs, batch)
        if mixed:
            raise GradsightError(
                "the loss mixes samples: the gradient at one sample's output depends on another "
                "sample's output, as in contrastive losses, so no sample has a gradient of its "
                "own. Train without the engine, or use a mean over samples."
            )

    def before_backward(self, loss: Tensor, *, keeps_outputs: bool = False) -> None:
        """Refuse a loss that was not split, and let go of the outputs: they may be large."""
        if self.joined is not None and not self.joined.one_pass.losses:
            known = ", ".join(sorted(loss.__name__ for loss in LOSSES))
            raise OnePassRefusal(
                f"one pass found no loss function of torch in the pass (it knows {known}), so the "
                "validation rows cannot be told from the training rows in the loss. engine.loss() "
                "takes any loss_fn of the model's outputs."
            )
        if self.joined is not None:
            refuse_other_terms(loss)
        if not keeps_outputs:
            self.forget_outputs()

    def forget_outputs(self) -> None:
        """Let go of what the model returned."""
        self.outputs.clear()
        self.loss_inputs.clear()


def refuse_batch_norm(root: nn.Module) -> None:
    """An error if a BatchNorm of the model is in training mode."""
    for name, module in root.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise GradsightError(
                f"{name or 'the model'} is a {type(module).__name__} in training mode: its "
                "statistics mix the samples of a batch, so no sample has a gradient of its own. "
                "Put it in evaluation mode, or use GroupNorm or LayerNorm."
            )


def refuse_batch_statistics(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """An error for a call of F.batch_norm that computes statistics of the batch."""
    if argument_of(args, kwargs, 5, "training", False):
        raise GradsightError(
            "batch_norm is called with training=True: its statistics mix the samples of a batch, "
            "so no sample has a gradient of its own"
        )


def mixes_samples(loss: Tensor, outputs: Sequence[Tensor], batch: int) -> bool:
    """Whether the gradient at one sample's output depends on another sample's output.

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
        # A random vector on the even samples alone: whatever comes back on odd ones has crossed.
        even = torch.zeros_like(first)
        source = torch.Generator("cpu").manual_seed(0)
        noise = torch.randn(even[::2].shape, generator=source, device="cpu")
        even[::2] = noise.to(even)
        second = torch.autograd.grad(first, rows[0], even, retain_graph=True, allow_unused=True)[0]
    except RuntimeError:
        return False
    if second is None:
        return False
    own = second[::2].abs().max()
    foreign = second[1::2].abs().max()
    return bool(foreign > 1e-4 * own) and bool(foreign > 0)
