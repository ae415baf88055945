# mypy: allow-untyped-calls, disable-error-code="no-untyped-def"
"""Rules that a compiler can trace: functions of tensors and numbers, without side effects.

They are those of one pass (joined_rules/) and of two (rules/) for one target, samples in dimension
0. What a tied head owes its embedding travels as the gradient of two wires, tensors of zeros that
take no memory: autograd keeps the order, and a compiler sees nothing but gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _matrices(tensor: Tensor, rows: int) -> Tensor:
    return tensor.reshape(rows, -1, tensor.shape[-1])


def _product(left: Tensor, right: Tensor) -> Tensor:
    return left.flatten(0, 1).t() @ right.flatten(0, 1)


class OnePassProduct(torch.autograd.Function):
    """x W^T + b over joined rows; with wires where the weight is an embedding's too."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, probe, train, total, head, owed, tokens) -> Tensor:
        """The plain product."""
        ctx.train = train
        ctx.total = total
        ctx.has_bias = bias is not None
        ctx.tied = tokens is not None
        if ctx.tied:
            ctx.save_for_backward(x, weight, tokens)
        else:
            ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of the training rows, the scores, and what goes along the wires."""
        x, weight, *tokens = ctx.saved_tensors
        n = ctx.train
        slopes = _matrices(grad, ctx.total)
        inputs = _matrices(x, ctx.total)
        direction = _product(slopes[n:], inputs[n:])
        scores = ((inputs[:n] @ direction.t()) * slopes[:n]).sum((1, 2))
        db = head = owed = None
        if ctx.has_bias:
            sums = slopes.sum(1)
            db = sums[:n].sum(0)
            scores = scores + sums[:n] @ sums[n:].sum(0)
        if ctx.tied:
            head = direction
            owed = torch.einsum("bts,btd->bsd", slopes[:n][:, :, tokens[0]], inputs[:n])
        dw = _product(slopes[:n], inputs[:n])
        return grad @ weight, dw, db, scores.unsqueeze(0), None, None, head, owed, None


class OnePassLookup(torch.autograd.Function):
    """W[index] over joined rows."""

    @staticmethod
    def forward(ctx: Any, index, weight, probe, train) -> Any:
        """The plain lookup."""
        ctx.save_for_backward(index)
        ctx.rows = weight.shape[0]
        ctx.train = train
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The training rows' gradient, and the scores."""
        (index,) = ctx.saved_tensors
        n = ctx.train
        scattered = torch.ops.aten.embedding_dense_backward
        dw = scattered(grad[:n], index[:n], ctx.rows, -1, False)
        along = scattered(grad[n:], index[n:], ctx.rows, -1, False)
        scores = (F.embedding(index[:n], along) * grad[:n]).flatten(1).sum(1)
        return None, dw, scores.unsqueeze(0), None


class OnePassTiedLookup(torch.autograd.Function):
    """W[index] over joined rows, and the wires for a head that is tied to W."""

    @staticmethod
    def forward(ctx: Any, index, weight, probe, train) -> Any:
        """The plain lookup, and two wires."""
        ctx.save_for_backward(index)
        ctx.rows = weight.shape[0]
        ctx.train = train
        zero = weight.new_zeros(())
        tokens = index[train:].numel()
        head = zero.expand(weight.shape)
        owed = zero.expand(train, tokens, weight.shape[1])
        return F.embedding(index, weight), head, owed

    @staticmethod
    def backward(ctx: Any, grad: Tensor, head: Tensor, owed: Tensor) -> Any:
        """The training rows' gradient, and the scores along both parts of the direction."""
        (index,) = ctx.saved_tensors
        n = ctx.train
        scattered = torch.ops.aten.embedding_dense_backward
        dw = scattered(grad[:n], index[:n], ctx.rows, -1, False)
        along = scattered(grad[n:], index[n:], ctx.rows, -1, False) + head
        cross = torch.einsum("bsd,sd->b", owed, grad[n:].reshape(-1, grad.shape[-1]))
        scores = (F.embedding(index[:n], along) * grad[:n]).flatten(1).sum(1) + cross
        return None, dw, scores.unsqueeze(0), None


class OnePassAffine(torch.autograd.Function):
    """n w + b over joined rows, n being a normalised input."""

    @staticmethod
    def forward(ctx: Any, normalised, weight, bias, probe, train, total) -> Any:
        """The plain operation."""
        ctx.save_for_backward(normalised, weight)
        ctx.train = train
        ctx.total = total
        return normalised * weight + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of the training rows, and the scores."""
        normalised, weight = ctx.saved_tensors
        n = ctx.train
        scale = _matrices(grad * normalised, ctx.total).sum(1)
        shift = _matrices(grad, ctx.total).sum(1)
        scores = scale[:n] @ scale[n:].sum(0) + shift[:n] @ shift[n:].sum(0)
        own = scale[:n].sum(0), shift[:n].sum(0)
        return grad * weight, *own, scores.unsqueeze(0), None, None


class TwoPassLinear(torch.autograd.Function):
    """x W^T + b, scored along a direction that is known."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, probe, dw, db) -> Tensor:
        """The plain product."""
        ctx.save_for_backward(x, weight, dw, db)
        ctx.samples = probe.shape[1]
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The plain gradients, and the scores."""
        x, weight, dw, db = ctx.saved_tensors
        along = F.linear(x, dw, db) * grad
        scores = along.reshape(ctx.samples, -1).sum(1)
        slopes = grad.reshape(-1, grad.shape[-1])
        own = slopes.t() @ x.reshape(-1, x.shape[-1])
        bias = None if db is None else slopes.sum(0)
        return grad @ weight, own, bias, scores.unsqueeze(0), None, None


class TwoPassEmbedding(torch.autograd.Function):
    """W[index], scored along a direction that is known."""

    @staticmethod
    def forward(ctx: Any, index, weight, probe, direction) -> Tensor:
        """The plain lookup."""
        ctx.save_for_backward(index, direction)
        ctx.rows = weight.shape[0]
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The plain gradient, and the scores."""
        index, direction = ctx.saved_tensors
        own = torch.ops.aten.embedding_dense_backward(grad, index, ctx.rows, -1, False)
        scores = (F.embedding(index, direction) * grad).flatten(1).sum(1)
        return None, own, scores.unsqueeze(0), None


class TwoPassAffine(torch.autograd.Function):
    """n w + b, scored along a direction that is known."""

    @staticmethod
    def forward(ctx: Any, normalised, weight, bias, probe, dw, db) -> Any:
        """The plain operation."""
        ctx.save_for_backward(normalised, weight, dw, db)
        ctx.samples = probe.shape[1]
        return normalised * weight + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The plain gradients, and the scores."""
        normalised, weight, dw, db = ctx.saved_tensors
        slopes = grad * normalised
        scores = (slopes * dw + grad * db).reshape(ctx.samples, -1).sum(1)
        width = grad.shape[-1]
        own = slopes.reshape(-1, width).sum(0), grad.reshape(-1, width).sum(0)
        return grad * weight, *own, scores.unsqueeze(0), None, None
