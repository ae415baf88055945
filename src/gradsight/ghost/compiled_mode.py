# mypy: allow-untyped-calls, disable-error-code="no-untyped-def"
"""A function mode that a compiler can trace: it decides by function and parameter alone.

It knows linear layers (Hugging Face's Conv1D too), embeddings, norms, scales and shifts, with the
samples in dimension 0, in one pass also dropout and a loss inside of the model. A parameter that
meets any other operation is refused. What is known of a parameter is an attribute of it while the
pass runs: by its identity, each of a model's equal blocks would be a graph of its own.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradsight.core.samples import LOSSES
from gradsight.errors import GradsightError
from gradsight.ghost.compiled_functions import (
    SplitLoss,
    TracedLookup,
    TracedProduct,
    TracedScale,
    TracedShift,
    TracedTiedLookup,
)
from gradsight.ghost.joined_calls import DROPOUTS, refuse_other_terms
from gradsight.ghost.one_pass import OnePassRefusal

ATTRIBUTE = "_gradsight_scored"
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
SCALES = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
SHIFTS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
BACKWARD = (Tensor.backward, torch.autograd.backward)
GRAPH_FILE = "<eval_with_key>"
"""The name that torch.fx gives the code of a graph."""
MOST_FRAMES = 6
"""Between such code and a mode: torch's functions that ask it."""
ASKED = frozenset({"__get__", "size", "dim", "numel", "is_floating_point", "stride", "type"})
"""What may be asked of a parameter."""


class Scored:
    """What a compiled pass knows of a parameter."""

    def __init__(self, probe: Tensor, given: tuple[Tensor, ...], *, tied: bool) -> None:
        self.probe = probe
        """A zero table [targets, B]; its gradient is the scores."""
        self.given = given
        """Each target's direction; in one pass nothing, or what scales them (see `scale_of`)."""
        self.tied = tied
        """Whether one pass has it as an embedding and as a head."""


def known_of(x: Any) -> Any:
    """What is known of a parameter; None for every other tensor."""
    return getattr(x, ATTRIBUTE, None) if isinstance(x, nn.Parameter) else None


class TraceableMode(TorchFunctionMode):
    """Swaps functions with parameters for those that score."""

    def __init__(
        self, sizes: tuple[int, ...], seed: Tensor, *, splits_loss: bool, by_parameter: bool
    ) -> None:
        """`sizes`: see compiled_functions. `seed`: what targets' losses are pulled back with.

        by_parameter: whether each parameter has a probe of its own.
        """
        super().__init__()
        self.by_parameter = by_parameter
        self.sizes = sizes
        self.seed = seed
        self.splits_loss = splits_loss
        self.losses: Any = None
        """Each target's loss, where the loss was split in the pass."""
        self.head: Any = None
        self.owed: Any = None
        self.tokens: Any = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)  # compiled code runs so, with this mode on torch's stack

        def given(position: int, name: str, default: Any = None) -> Any:
            return args[position] if len(args) > position else kwargs.get(name, default)

        if func is F.linear:
            x, weight, bias = given(0, "input"), given(1, "weight"), given(2, "bias")
            if known_of(weight) is not None or known_of(bias) is not None:
                return self.product(x, weight, bias)
        elif func is torch.addmm and len(args) == 3 and not kwargs:
            if known_of(args[2]) is not None and args[0].dim() == 1:
                return self.product(args[1], args[2], args[0], turned=True)
        elif func in PRODUCTS and len(args) == 2:
            if known_of(args[1]) is not None and args[1].dim() == 2:
                return self.product(args[0], args[1], None, turned=True)
        elif func is F.embedding:
            if known_of(given(1, "weight")) is not None:
                refuse_odd_lookup(given)
                return self.embedding(
                    given(0, "input"), given(1, "weight"), given(2, "padding_idx")
                )
        elif func is F.layer_norm:
            weight, bias = given(2, "weight"), given(3, "bias")
            if known_of(weight) is not None or known_of(bias) is not None:
                eps = given(4, "eps", 1e-5)
                shape = given(1, "normalized_shape")
                normalised = F.layer_norm(given(0, "input"), shape, None, None, eps)
                return self.affine(normalised, weight, bias)
        elif func is F.rms_norm or func is torch.rms_norm:
            weight = given(2, "weight")
            if known_of(weight) is not None:
                shape = given(1, "normalized_shape")
                normalised = F.rms_norm(given(0, "input"), shape, None, given(3, "eps"))
                return self.affine(normalised, weight, None)
        elif (func in SCALES or func in SHIFTS) and len(args) == 2 and not kwargs:
            rule = TracedScale if func in SCALES else TracedShift
            if known_of(args[1]) is not None:
                return self.elementwise(rule, args[0], args[1])
            if known_of(args[0]) is not None and isinstance(args[1], Tensor):
                return self.elementwise(rule, args[1], args[0])
        elif func in BACKWARD:
            self.refuse_unsplit(args[0])
        elif len(self.sizes) > 1 and not in_compiled_graph():
            if func in DROPOUTS:
                active = given(2, "training", kwargs.get("train", True))
                if active and given(1, "p", 0.5):
                    return self.drop_out(func, given)
            elif func is F.scaled_dot_product_attention:
                if given(4, "dropout_p", 0.0):
                    return self.attend(given, kwargs)
            elif self.splits_loss and func in LOSSES:
                return self.split_loss(func, list(args), dict(kwargs))
        refuse_parameters(func, args, kwargs)
        return func(*args, **kwargs)

    def product(self, x: Tensor, weight: Any, bias: Any, *, turned: bool = False) -> Any:
        """A linear layer; `turned`: its weight is [inputs, outputs]."""
        self.refuse_other_rows(x)
        of_weight, of_bias = known_of(weight), known_of(bias)
        if of_weight is None and weight.requires_grad:
            raise GradsightError("a weight is made of parameters")
        if of_bias is None and bias is not None and bias.requires_grad:
            raise GradsightError("a bias is made of parameters")
        tensors = [] if of_weight is None else list(of_weight.given)
        count = len(tensors)
        if turned:
            weight = weight.t()
            tensors = [each.t() for each in tensors]
        if of_bias is not None:
            tensors += of_bias.given
        wires = of_weight is not None and of_weight.tied and self.tokens is not None
        if wires:
            tensors = [self.head, self.owed, self.tokens, *tensors]
        if torch.is_autocast_enabled(x.device.type):
            narrow = torch.get_autocast_dtype(x.device.type)
            x = x.to(narrow)
            weight = weight.to(narrow)
            bias = None if bias is None else bias.to(narrow)
        probes = [None if of_weight is None else of_weight.probe, None]
        if of_bias is not None and (of_weight is None or self.by_parameter):
            probes[1] = of_bias.probe
        scores_bias = of_bias is not None
        rest = self.sizes, scores_bias, wires, count
        return TracedProduct.apply(x, weight, bias, *probes, *rest, *tensors)

    def embedding(self, index: Tensor, weight: Any, padding: int | None) -> Any:
        """A lookup; one that a head is tied to leaves wires."""
        rows = sum(self.sizes)
        known = known_of(weight)
        if index.shape[0] != rows:
            if index.dim() > 2 or (index.dim() == 2 and index.shape[0] != 1):
                raise GradsightError("samples are not in dimension 0 of what a table is asked for")
            # Positions, the same for every sample.
            index = index.reshape(1, -1).expand(rows, -1)
        if padding is None:
            padding = -1
        elif padding < 0:
            padding = padding + weight.shape[0]
        rest = known.probe, self.sizes, padding, *known.given
        if not known.tied:
            return TracedLookup.apply(index, weight, *rest)
        found, head, owed = TracedTiedLookup.apply(index, weight, *rest)
        self.head = head
        self.owed = owed
        self.tokens = index[self.sizes[0] :].reshape(-1)
        return found

    def affine(self, normalised: Tensor, weight: Any, bias: Any) -> Any:
        """What is left of a norm."""
        if weight is not None:
            normalised = self.elementwise(TracedScale, normalised, weight)
        if bias is not None:
            normalised = self.elementwise(TracedShift, normalised, bias)
        return normalised

    def elementwise(self, rule: Any, x: Tensor, parameter: Any) -> Any:
        """A scale or a shift."""
        known = known_of(parameter)
        if known is None:
            if parameter.requires_grad:
                raise GradsightError("a scale or a shift is made of parameters")
            return x * parameter if rule is TracedScale else x + parameter
        self.refuse_other_rows(x)
        inside = parameter.dim() < x.dim() or (
            parameter.dim() == x.dim() and parameter.shape[0] == 1
        )
        flat = x.shape[0] != sum(self.sizes)
        if not inside or parameter.dim() == 0 or (flat and parameter.dim() > 1):
            raise GradsightError("a parameter is broadcast otherwise than over samples")
        if torch.broadcast_shapes(x.shape, parameter.shape) != x.shape:
            raise GradsightError("samples are broadcast over a parameter")
        if parameter.dim() == 1 and parameter.shape[0] != x.shape[-1]:
            raise GradsightError("a single number is a parameter")
        return rule.apply(x, parameter, known.probe, self.sizes, *known.given)

    def drop_out(self, func: Callable[..., Any], given: Callable[..., Any]) -> Any:
        """Drop out entries of the training rows, with the random numbers of plain training."""
        x = given(0, "input")
        self.refuse_other_rows(x)
        if given(3, "inplace", False):
            raise GradsightError("a dropout works in place")
        count = x.shape[0] // sum(self.sizes) * self.sizes[0]
        return torch.cat([func(x[:count], given(1, "p", 0.5), True), x[count:]])

    def attend(self, given: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
        """Attention with dropout: the training rows with it, the others without."""
        rows = sum(self.sizes)
        n = self.sizes[0]
        tensors = [given(0, "query"), given(1, "key"), given(2, "value")]
        if any(each.shape[0] != rows for each in tensors):
            raise GradsightError("samples are not in dimension 0 of what attention drops out")
        mask = given(3, "attn_mask")
        masks = [mask, mask]
        if mask is not None and mask.dim() == tensors[0].dim() and mask.shape[0] == rows:
            masks = [mask[:n], mask[n:]]
        rest = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
        attention: Any = F.scaled_dot_product_attention
        causal = bool(given(5, "is_causal", False))
        rate = given(4, "dropout_p", 0.0)
        training = attention(*[t[:n] for t in tensors], masks[0], rate, causal, **rest)
        others = attention(*[t[n:] for t in tensors], masks[1], 0.0, causal, **rest)
        return torch.cat([training, others])

    def split_loss(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The training rows' loss; each target's is pulled back with it."""
        predictions = kwargs.pop("input") if "input" in kwargs else args.pop(0)
        labels = kwargs.pop("target") if "target" in kwargs else args.pop(0)
        if self.losses is not None or kwargs.get("reduction", "mean") == "none":
            raise GradsightError("the loss is not one call of a loss function of torch's")
        self.refuse_other_rows(predictions)
        self.refuse_other_rows(labels)
        pieces = [self.pieces(predictions), self.pieces(labels)]
        losses = [func(own, wanted, *args, **kwargs) for own, wanted in zip(*pieces, strict=True)]
        self.losses = [each.detach() for each in losses[1:]]
        return SplitLoss.apply(self.seed, *losses)

    def pieces(self, x: Tensor) -> Sequence[Tensor]:
        """The rows of training and of each target."""
        each = x.shape[0] // sum(self.sizes)
        pieces: Sequence[Tensor] = x.split([size * each for size in self.sizes])
        return pieces

    def refuse_unsplit(self, loss: Any) -> None:
        """An error where a loss is pulled back whose rows were not told apart."""
        if self.splits_loss and self.losses is None:
            raise OnePassRefusal("one pass found no loss function of torch in the pass.")
        if self.splits_loss and isinstance(loss, Tensor):
            refuse_other_terms(loss, if_split_here=True)

    def refuse_other_rows(self, x: Tensor) -> None:
        """An error where samples are not the entries of dimension 0, one or several for each."""
        if x.dim() == 0 or x.shape[0] % sum(self.sizes):
            raise GradsightError("samples are not in dimension 0 of what goes into a layer")


def in_compiled_graph() -> bool:
    """Whether a graph that was traced with this mode is running, uncompiled (backend="eager")."""
    if torch.compiler.is_compiling():
        return False
    frame: FrameType | None = sys._getframe(2)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename.startswith(GRAPH_FILE):
            return True
        frame = frame.f_back
    return False


def refuse_odd_lookup(given: Callable[..., Any]) -> None:
    """An error for lookups that do more than to look up."""
    odd = given(5, "scale_grad_by_freq", False) or given(6, "sparse", False)
    if odd or given(3, "max_norm") is not None:
        raise GradsightError("an embedding has max_norm, scale_grad_by_freq or sparse")


def refuse_parameters(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> None:
    """An error where a scored parameter is about to meet an operation without a rule."""
    for x in (*args, *kwargs.values()):
        inner = x if isinstance(x, (list, tuple)) else (x,)
        for each in inner:
            if known_of(each) is None or func.__name__ in ASKED:
                continue
            if not in_compiled_graph():
                raise GradsightError(f"{func.__name__} with a parameter is not known to it")
