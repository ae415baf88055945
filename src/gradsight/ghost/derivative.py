"""The directional derivative of any operation."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gradsight.core.autocast import autocast_to
from gradsight.core.devices import generator_state as device_state
from gradsight.core.random_state import drawing_again
from gradsight.errors import GradsightError

STRUCTURAL = frozenset(
    {
        "t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims",
        "T.__get__", "mT.__get__", "H.__get__", "mH.__get__", "adjoint",
        "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone",
        "expand", "broadcast_to", "repeat", "repeat_interleave", "tile",
        "to", "float", "double", "half", "bfloat16",
        "split", "chunk", "tensor_split", "unbind", "narrow", "select", "index_select", "gather",
        "__getitem__", "flip", "roll", "tril", "triu", "diagonal",
        "neg", "__neg__", "sum", "mean",
    }
)  # fmt: skip
"""Linear operations on one tensor that treat the derivative as they treat the value."""

RANDOM = frozenset(
    {
        "dropout", "dropout_", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
        "dropout1d", "dropout2d", "dropout3d", "native_dropout", "bernoulli", "rrelu",
        "lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention",
    }
)  # fmt: skip
"""Operations that may draw random numbers: repeated with the generator's first state."""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A torch function and its arguments, flattened."""

    func: Callable[..., Any]
    spec: TreeSpec
    device: str = "cpu"
    generator_state: Mapping[str, Tensor] | None = None
    autocast: torch.dtype | None = None
    """What automatic mixed precision computes in; None when it is off."""

    @property
    def name(self) -> str:
        """A readable name; getters are named after their attribute."""
        return function_name(self.func)

    def run_first(self, flat: Sequence[Any]) -> Any:
        """The call itself, whose random numbers are drawn for the first time."""
        args, kwargs = tree_unflatten(list(flat), self.spec)
        return self.func(*args, **kwargs)

    def run(self, flat: Sequence[Any]) -> list[Any]:
        """The flattened outputs of the call with these inputs."""
        args, kwargs = tree_unflatten(list(flat), self.spec)
        with drawing_again(self.generator_state), autocast_to(self.device, self.autocast):
            outputs, _ = tree_flatten(self.func(*args, **kwargs))
        return outputs


def function_name(func: Callable[..., Any]) -> str:
    """A readable name of a torch function.

    >>> function_name(torch.Tensor.T.__get__), function_name(torch.add)
    ('T.__get__', 'add')
    """
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return f"{getattr(getattr(func, '__self__', None), '__name__', '?')}.__get__"
    return str(name)


def generator_state(func: Callable[..., Any], device: torch.device) -> Mapping[str, Tensor] | None:
    """The random state before a call that may draw from it; None for all other calls."""
    if function_name(func) not in RANDOM:
        return None
    return {str(device): device_state(device)}


def tangents_of(
    call: OperatorCall, flat: Sequence[Any], tangents: Mapping[int, Tensor]
) -> list[Tensor | None]:
    """d f(inputs) along tangents by input position, one per flattened output; None where zero."""
    if call.name in STRUCTURAL and set(tangents) == {0}:
        with torch.no_grad():
            outputs = call.run([tangents[0], *flat[1:]])
        return [y if isinstance(y, Tensor) else None for y in outputs]
    if call.func is F.embedding_bag and set(tangents) == {1} and "max" not in flat:
        with torch.no_grad():
            outputs = call.run([flat[0], tangents[1], *flat[2:]])
        return [y if _is_float(y) else None for y in outputs]
    if call.func is F.embedding and set(tangents) == {1}:
        return [_embedding(call, flat, tangents[1])]
    try:
        return _forward_mode(call, flat, tangents)
    except (NotImplementedError, RuntimeError) as error:
        try:
            return _double_backward(call, flat, tangents)
        except (NotImplementedError, RuntimeError):
            raise GradsightError(
                f"torch knows no directional derivative of {call.name} ({error}), so samples "
                "cannot be told apart behind it. Freeze the parameters that go into it, or write "
                "it with other operations."
            ) from error


def _embedding(call: OperatorCall, flat: Sequence[Any], direction: Tensor) -> Tensor:
    """D[index], zero at padding_idx: the row there gets no gradient, though it has a value."""
    args, kwargs = tree_unflatten(list(flat), call.spec)
    index = args[0]
    padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
    with torch.no_grad():
        along = F.embedding(index, direction)
        if padding is not None:
            along.masked_fill_((index == padding % direction.shape[0]).unsqueeze(-1), 0.0)
    return along


@cache
def _load_forward_mode() -> None:
    """Let torch compile the formulas that it compiles when forward mode is first used."""
    # It warns about its own way of doing so.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        forward_ad._maybe_load_decompositions()  # type: ignore[no-untyped-call]


def _forward_mode(
    call: OperatorCall, flat: Sequence[Any], tangents: Mapping[int, Tensor]
) -> list[Tensor | None]:
    _load_forward_mode()
    inputs = _detached(flat)
    with torch.no_grad(), differentiable_kernels(), forward_ad.dual_level():
        for i, tangent in tangents.items():
            value = inputs[i].contiguous()
            along = tangent.to(inputs[i].dtype).contiguous()
            inputs[i] = forward_ad.make_dual(value, along)  # type: ignore[no-untyped-call]
        return [_tangent(y) for y in call.run(inputs)]


def _tangent(y: Any) -> Tensor | None:
    """A copy of an output's tangent; None where it is zero."""
    if not _is_float(y):
        return None
    tangent: Tensor | None = forward_ad.unpack_dual(y).tangent  # type: ignore[no-untyped-call]
    return None if tangent is None else tangent.clone()


def _double_backward(
    call: OperatorCall, flat: Sequence[Any], tangents: Mapping[int, Tensor]
) -> list[Tensor | None]:
    """J v as the derivative of u -> J^T u along v, for operations without a forward formula."""
    inputs = _detached(flat)
    for i in tangents:
        inputs[i] = inputs[i].clone().requires_grad_()
    leaves = [inputs[i] for i in tangents]
    found: list[Tensor | None] = []
    with torch.enable_grad(), differentiable_kernels():
        for y in call.run(inputs):
            if not _is_float(y) or not y.requires_grad:
                found.append(None)
                continue
            dummy = torch.zeros_like(y, requires_grad=True)
            pulled = torch.autograd.grad(
                y, leaves, dummy, create_graph=True, retain_graph=True, allow_unused=True
            )
            pairs = zip(pulled, tangents.values(), strict=True)
            used = [(p, t.to(p.dtype)) for p, t in pairs if p is not None]
            (along,) = torch.autograd.grad(
                [p for p, _ in used], dummy, [t for _, t in used], retain_graph=True
            )
            found.append(along)
    return found


def _detached(flat: Sequence[Any]) -> list[Any]:
    return [x.detach() if isinstance(x, Tensor) else x for x in flat]


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


@contextmanager
def differentiable_kernels() -> Iterator[None]:
    """Only kernels with a forward-mode formula: plain attention, no fused recurrent layers."""
    onednn = torch._C._get_mkldnn_enabled()
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.callback(torch._C._set_mkldnn_enabled, onednn)
        torch._C._set_mkldnn_enabled(False)
        yield
