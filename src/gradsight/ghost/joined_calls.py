# mypy: allow-untyped-calls
"""Operations that joined rows must not share: dropout, random numbers, and the loss."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsight.core.samples import LOSSES, tensors_in
from gradsight.ghost.derivative import function_name
from gradsight.ghost.joined_operations import run_sliced, sliced_apart
from gradsight.ghost.one_pass import OnePass, OnePassRefusal
from gradsight.ghost.row_moves import DRAWING
from gradsight.ghost.row_parts import pieces_of
from gradsight.ghost.sample_axis import LEADING, SampleLayout, candidates
from gradsight.ghost.use import DECLINED, argument_of

if TYPE_CHECKING:
    from gradsight.ghost.tracer import Tracer

DROPOUTS = frozenset(
    {
        F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
        F.feature_alpha_dropout, torch.dropout, torch.feature_dropout, torch.alpha_dropout,
        torch.feature_alpha_dropout,
    }
)  # fmt: skip
"""Functions of (input, p, training) that drop out entries."""
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


class JoinedCalls:
    """Looks at every operation of one pass before it runs."""

    def __init__(self, one_pass: OnePass, *, splits_loss: bool) -> None:
        self.one_pass = one_pass
        self.splits_loss = splits_loss
        """Whether the loss is computed by one call of a loss function of torch's, of all rows."""
        self.dropped_out = False
        """Whether there was an active dropout."""

    def intercept(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tracer: "Tracer",
    ) -> Any:
        """What the call gives where rows must be told apart in it; DECLINED for all others."""
        if func in LOSSES or func in DROPOUTS or func is F.scaled_dot_product_attention:
            self.refuse_picked_rows(tracer, tensors_in(*args, *kwargs.values()))
        if func in LOSSES:
            if self.splits_loss and torch.is_grad_enabled():
                return self._split_loss(func, list(args), dict(kwargs))
            return DECLINED
        if func in DROPOUTS:
            return self._drop_out(func, args, kwargs, tracer)
        if func is F.scaled_dot_product_attention:
            return self._attend(args, kwargs, tracer)
        name = function_name(func)
        if name in DRAWING:
            raise OnePassRefusal(
                f"{name} draws random numbers, which validation rows in the same pass would change."
            )
        if name in RECURRENT:
            self._refuse_recurrent_dropout(name, args)
        return DECLINED

    def refuse_picked_rows(self, tracer: "Tracer", tensors: Iterable[Tensor]) -> None:
        """Raise if rows were selected by the data: any of them may be validation rows."""
        by_values = tracer.moves.of(tensors).by_values
        if by_values is not None:
            raise OnePassRefusal(f"the model selects rows by the data ({by_values}).")

    def _drop_out(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tracer: "Tracer",
    ) -> Any:
        """Drop out entries of the training rows, with the random numbers of plain training."""
        x = argument_of(args, kwargs, 0, "input", None)
        rate = argument_of(args, kwargs, 1, "p", 0.5)
        active = argument_of(args, kwargs, 2, "training", kwargs.get("train", True))
        if not active or not rate:
            return DECLINED
        self.dropped_out = True
        if tracer.source(x) is not None:
            raise OnePassRefusal(f"{function_name(func)} drops out entries of a parameter.")
        layout = self._layout(x, tracer.likely_dim, function_name(func))
        pieces = pieces_of(x, layout, self.one_pass.parts)
        training = func(pieces[0], rate, True)
        if argument_of(args, kwargs, 3, "inplace", False):
            pieces[0].copy_(training)
            return x
        return torch.cat([training, *pieces[1:]], layout.dim)

    def _layout(self, x: Tensor, preferred: int, name: str) -> SampleLayout:
        layout = candidates(x.shape, self.one_pass.parts.total, preferred)[0]
        if layout is None or (layout.kind not in LEADING):
            raise OnePassRefusal(
                f"{name} is active on a tensor of shape {tuple(x.shape)}, in which the rows of "
                f"{self.one_pass.parts.total} samples cannot be told."
            )
        return layout

    def _attend(self, args: Sequence[Any], kwargs: Mapping[str, Any], tracer: "Tracer") -> Any:
        """Attention with dropout: the training rows with it, the others without."""
        rate = argument_of(args, kwargs, 4, "dropout_p", 0.0)
        if not rate:
            return DECLINED
        self.dropped_out = True
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = [argument_of(args, kwargs, i, name, None) for i, name in enumerate(names)]
        given[5] = bool(given[5])
        rest = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
        total = self.one_pass.parts.total
        if any(each.dim() < 3 or each.shape[0] != total for each in given[:3]):
            raise OnePassRefusal(
                "scaled_dot_product_attention drops out of tensors whose rows cannot be told."
            )
        layouts = dict.fromkeys(range(3), SampleLayout())
        mask = given[3]
        if mask is not None and mask.dim() == given[0].dim() and mask.shape[0] == total:
            layouts[3] = SampleLayout()
        operation, _ = tracer.joined_call(F.scaled_dot_product_attention, given, rest)
        if operation.carried:
            self.one_pass.count(operation.names)
            return run_sliced(self.one_pass, operation, layouts, {4: 0.0})
        return sliced_apart(self.one_pass.parts, operation, layouts, {4: 0.0})

    def _refuse_recurrent_dropout(self, name: str, args: Sequence[Any]) -> None:
        # (input, hidden, weights, has_biases, layers, dropout, training, ...)
        rates = [each for each in args if isinstance(each, float)]
        if any(rates) and any(each is True for each in args[6:8]):
            raise OnePassRefusal(f"{name} drops out inside (dropout={max(rates)}).")

    def _split_loss(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The training rows' loss; each target's is pulled back with it."""
        predictions = kwargs.pop("input") if "input" in kwargs else args.pop(0)
        labels = kwargs.pop("target") if "target" in kwargs else args.pop(0)
        data = [predictions, labels]
        parts = self.one_pass.parts
        reduced = kwargs.get("reduction", "mean") != "none"
        if not reduced or any(t.dim() == 0 or t.shape[0] % parts.total for t in data):
            raise OnePassRefusal(
                f"one pass cannot split {function_name(func)} by rows: it needs reduction 'mean' "
                f"or 'sum' and {parts.total} samples in rows, got shapes "
                f"{[tuple(t.shape) for t in data]}."
            )
        if self.one_pass.losses:
            raise OnePassRefusal(
                "one pass can split one call of a loss function per pass, this is the second."
            )
        # A loss over positions has several entries per sample, side by side.
        pieces = zip(*(pieces_of(t, SampleLayout(), parts) for t in data), strict=True)
        losses = [func(*piece, *args, **kwargs) for piece in pieces]
        return join_losses(self.one_pass, losses)


def join_losses(one_pass: OnePass, losses: Sequence[Tensor]) -> Tensor:
    """The training rows' loss, with every target's pulled back beside it."""
    one_pass.losses = dict(zip(one_pass.targets, (t.detach() for t in losses[1:]), strict=True))
    loss: Tensor = JoinedLoss.apply(one_pass, *losses)
    return loss


class JoinedLoss(torch.autograd.Function):
    """The training loss; whatever it is multiplied by later scales the training rows' part alone.

    Targets' losses are pulled back with 1, or with a GradScaler's factor: in 16 bits their
    gradients would vanish as those of training rows would.
    """

    @staticmethod
    def forward(ctx: Any, one_pass: OnePass, training: Tensor, *targets: Tensor) -> Tensor:
        """The value of the training loss."""
        ctx.one_pass = one_pass
        ctx.number = len(targets)
        return training.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for training, and each target's own beginning."""
        if not torch.is_grad_enabled():  # else a second derivative is being looked at
            ctx.one_pass.backwards += 1
        seed = torch.ones_like(grad)
        if ctx.one_pass.loss_scale is not None:
            seed = ctx.one_pass.loss_scale.to(grad).reshape(grad.shape)
        return None, grad, *(seed,) * ctx.number


SPLIT_BEFORE = ("JoinedLossBackward", "SplitLossBackward")
"""The nodes of autograd's graph behind which rows are told apart: of eager and of traced code."""


def refuse_other_terms(loss: Tensor, *, if_split_here: bool = False) -> None:
    """An error if anything but the split loss leads from this loss to the model.

    `if_split_here`: only where the split itself is in sight, not inside of compiled code.
    """
    nodes = _nodes_before_split(loss)
    if if_split_here and not any(node.name() in SPLIT_BEFORE for node in nodes):
        return
    for node in nodes:
        if node.name() in SPLIT_BEFORE:
            continue
        if node.name().startswith("Joined") or "AccumulateGrad" in node.name():
            raise OnePassRefusal(
                "validation rows took part in the training gradient, or a part of it belongs to no "
                "row: a part of the loss does not go through one loss function of torch's. Nothing "
                "of this step is scored."
            )


def _nodes_before_split(loss: Tensor) -> set[Any]:
    """The nodes that a backward pass comes to, up to the split loss."""
    seen: set[Any] = set()
    ahead = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() not in SPLIT_BEFORE:
            ahead += [behind for behind, _ in node.next_functions]
    return seen
