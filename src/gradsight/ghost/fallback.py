"""The universal way: exact for any operation, at the price of one more of it.

y = f(x, w) with batch data x and a direction D on w: sample i's share of <D, dL/dw> is the sum over
its rows of y-gradient times (f'(w) D). The derivative f'(w) D is taken in the backward pass by
forward-mode differentiation.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from gradsight.core.guard import raise_as_gradsight_error
from gradsight.errors import GradsightError
from gradsight.ghost.arguments import INCOMPLETE
from gradsight.ghost.derivative import OperatorCall
from gradsight.ghost.dots import row_dots, score_table
from gradsight.ghost.sample_axis import SampleLayout
from gradsight.ghost.tangent_sources import TangentSource, push_forward

Score = Callable[[Tensor, Sequence[Tensor]], list[tuple[int, Tensor]]]
"""From the gradient of an output and the saved tensors to pairs of slot and scores [B]."""


def once_differentiable(
    backward: Callable[..., tuple[Tensor | None, ...]],
) -> Callable[..., tuple[Tensor | None, ...]]:
    """A backward pass that refuses to be differentiated again, and raises GradsightErrors only.

    The functions here have no second derivative: a gradient penalty over them would lose its term
    in silence.
    """

    @wraps(backward)
    def refusing(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise GradsightError(
                "an observed pass was differentiated with create_graph=True (as for a gradient "
                "penalty), but its gradients cannot be differentiated again. Leave that term of "
                "the loss out of observe()."
            )
        try:
            return backward(ctx, *grads)
        except Exception as error:
            raise_as_gradsight_error(error, INCOMPLETE)

    return refusing


class Attach(torch.autograd.Function):
    """Hands a tensor on unchanged, and in the backward pass the scores found there to the probe."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, probe: Tensor, score: Score, *saved: Tensor) -> Tensor:
        """A fresh tensor of the same values."""
        # Views out of a custom function must not be changed in place, and FSDP2 warns about views
        # as outputs of modules.
        ctx.score = score
        ctx.probe = probe
        ctx.save_for_backward(*saved)
        return y.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient unchanged, and the scores as the gradient of the probe."""
        # As a gradient autograd adds the scores up itself: no side effects, safe under recompute.
        table = None
        if ctx.needs_input_grad[1]:
            table = score_table(ctx.score(grad, ctx.saved_tensors), ctx.probe)
        return grad, table, None, *(None,) * (len(ctx.needs_input_grad) - 3)


def attach(y: Tensor, probe: Tensor, score: Score, saved: Sequence[Tensor] = ()) -> Tensor:
    """y, with its per-sample scores going to the probe when it gets its gradient."""
    attached: Tensor = Attach.apply(y, probe, score, *saved)  # type: ignore[no-untyped-call]
    return attached


def attach_derivative(
    outputs: Sequence[Any],
    layouts: Mapping[int, SampleLayout],
    call: OperatorCall,
    flat: Sequence[Any],
    carried: Mapping[int, TangentSource],
    probe: Tensor,
) -> list[Any]:
    """The outputs of a call, those with a layout scored by the call's directional derivative."""
    saved = [x for x in flat if isinstance(x, Tensor)]
    shared = SharedDerivatives(call, flat, carried, len(layouts))
    scored = list(outputs)
    for j, layout in layouts.items():
        score = derivative_score(shared, j, layout, probe.shape[1])
        scored[j] = attach(outputs[j], probe, score, saved)
    return scored


class SharedDerivatives:
    """The derivatives of one call, kept from its first output that is scored to its last."""

    def __init__(
        self,
        call: OperatorCall,
        flat: Sequence[Any],
        carried: Mapping[int, TangentSource],
        readers: int,
    ) -> None:
        # Tensors are not kept here but handed back by autograd, which may have packed them.
        self._call = call
        self._rest = [None if isinstance(x, Tensor) else x for x in flat]
        self._where = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
        self._carried = carried
        self._readers = readers
        self._left = readers
        self._result: dict[int, list[Tensor | None]] | None = None

    def derivatives(self, saved: Sequence[Tensor]) -> dict[int, list[Tensor | None]]:
        """By slot, the derivative of every output."""
        result = self._result
        if result is None:
            flat = list(self._rest)
            for i, tensor in zip(self._where, saved, strict=True):
                flat[i] = tensor
            result = push_forward(self._call, flat, self._carried)
        self._left -= 1
        self._result = result if self._left > 0 else None
        if self._left == 0:
            self._left = self._readers
        return result


def derivative_score(
    shared: SharedDerivatives, index: int, layout: SampleLayout, batch: int
) -> Score:
    """The scores of one output of a call: its directional derivative dotted with its gradient."""

    def score(grad: Tensor, saved: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        pairs = []
        for slot, outputs in shared.derivatives(saved).items():
            tangent = outputs[index]
            if tangent is not None:
                pairs.append((slot, row_dots(tangent, grad, layout, batch)))
        return pairs

    return score
