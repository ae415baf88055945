"""Where the samples are in a call of a model: in its arguments, its outputs, its loss functions."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gradsight.core.function_modes import drop_own_frame
from gradsight.errors import GradsightError

LOSSES = frozenset(
    {
        F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
        F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div, F.gaussian_nll_loss,
        F.poisson_nll_loss, F.soft_margin_loss, F.multilabel_soft_margin_loss, F.multi_margin_loss,
    }
)  # fmt: skip
"""Loss functions whose first argument holds rows of samples, and whose other arguments are data."""


class NotSeparable(GradsightError):
    """Samples cannot be taken apart in this model, or are not independent in it."""


class OtherShapes(NotSeparable):
    """The output of the batch is not as many times that of one sample as there are samples."""


@dataclass(frozen=True, slots=True)
class SplitCall:
    """The arguments of one call of the model, and where the samples are in them."""

    flat: list[Any]
    spec: Any
    dims: Mapping[int, int]
    """By the position of a tensor among the arguments' leaves: the dimension with the samples."""
    batch: int

    def whole(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they came."""
        args, kwargs = tree_unflatten(self.flat, self.spec)
        return args, kwargs

    def row(self, i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with sample i alone."""
        flat = list(self.flat)
        for position, dim in self.dims.items():
            size = flat[position].shape[dim] // self.batch
            flat[position] = flat[position].narrow(dim, i * size, size)
        args, kwargs = tree_unflatten(flat, self.spec)
        return args, kwargs


def find_samples(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    size: int | None,
    batch_dim: int | None,
    root: nn.Module,
) -> SplitCall:
    """Find the samples in the arguments of a call of the model.

    The number of samples is `size` where given; else that of dimension `batch_dim`, by default 0,
    or 1 where the model says batch_first=False or only dimension 1 is the same in all tensors.
    """
    flat, spec = tree_flatten((tuple(args), dict(kwargs)))
    tensors = {
        i: x
        for i, x in enumerate(flat)
        if isinstance(x, Tensor) and x.dim() > 0 and not x.is_nested  # those have no one shape
    }
    if not tensors:
        raise NotSeparable(
            f"the size of the batch cannot be told: {type(root).__name__} was called without a "
            "tensor of at least one dimension."
        )
    if batch_dim is None:
        batch_dim = _likely_dim(root, list(tensors.values()), size)
    first = next(iter(tensors.values()))
    batch = size if size is not None else first.shape[min(batch_dim, first.dim() - 1)]
    dims = {}
    for position, tensor in tensors.items():
        dim = _find_dim(tensor, batch, batch_dim)
        if dim is not None:
            dims[position] = dim
    if not dims and batch > 0:
        # Several rows per sample: their number is a multiple of the batch's.
        dims = {i: 0 for i, x in tensors.items() if x.shape[0] % batch == 0}
    if not dims or batch == 0:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors.values())
        raise NotSeparable(
            f"the size of the batch cannot be told: expected {batch} samples in the tensors that "
            f"the model was called with, got the shapes {shapes}."
        )
    return SplitCall(flat, spec, dims, batch)


def _likely_dim(root: nn.Module, tensors: Sequence[Tensor], size: int | None) -> int:
    if getattr(root, "batch_first", True) is False:
        return 1
    sizes_at = [{t.shape[d] for t in tensors if t.dim() > d and t.shape[d] != 1} for d in (0, 1)]
    if size is not None:
        only_second = size != 1 and size not in sizes_at[0] and size in sizes_at[1]
        return 1 if only_second else 0
    alike_at_second = len(sizes_at[1]) == 1 and all(t.dim() > 1 for t in tensors)
    return 1 if len(sizes_at[0]) > 1 and alike_at_second else 0


def _find_dim(tensor: Tensor, batch: int, preferred: int) -> int | None:
    for dim in (preferred, 0, 1):
        if dim < tensor.dim() and tensor.shape[dim] == batch:
            return dim
    return None


def tensors_in(*values: Any) -> list[Tensor]:
    """All tensors of arguments or outputs in their order, also those inside containers and objects.

    >>> one, two = torch.ones(1), torch.ones(2)
    >>> [len(tensor) for tensor in tensors_in(3, {"x": [one, "text"]}, (two,))]
    [1, 2]
    """
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) not in _NO_CONTAINERS:
            tensors += _tensors_inside(value)
    return tensors


_NO_CONTAINERS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, slice})
"""Passed over at once: this runs for every operation that the ghost engine sees."""


def _tensors_inside(value: Any) -> list[Tensor]:
    # Not pytree alone: to it, Hugging Face's BatchEncoding (a UserDict) and dataclasses are leaves.
    if isinstance(value, list | tuple):
        return tensors_in(*value)
    if isinstance(value, Mapping):
        return tensors_in(*value.values())
    leaves = tree_leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return tensors_in(*leaves)
    if hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        return [item for item in vars(value).values() if isinstance(item, Tensor)]
    return []


class LossInputs(TorchFunctionMode):
    """Collects what goes into loss functions, for models that return nothing but their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation; remember the predictions if it is a loss."""
        if func in LOSSES:
            self.seen.append(args[0] if args else (kwargs or {})["input"])
        try:
            return func(*args, **(kwargs or {}))
        except BaseException as error:
            drop_own_frame(error)
            raise


@contextmanager
def collecting_loss_inputs(seen: list[Tensor]) -> Iterator[None]:
    """Append to `seen` what loss functions are given in here."""
    with LossInputs() as mode:
        yield
    seen += mode.seen


def with_rows(outputs: Sequence[Tensor], losses: Sequence[Tensor]) -> list[Tensor]:
    """The outputs that samples have rows in: the model's, or what its loss functions were given."""
    own = [y for y in outputs if can_have_rows(y)]
    return own or [y for y in losses if can_have_rows(y)]


def can_have_rows(y: Tensor) -> bool:
    """Whether a tensor can be pulled back by rows."""
    return y.is_floating_point() and y.requires_grad and y.dim() > 0


def rows_of_sample(
    whole: Tensor, alone: Tensor, i: int, batch: int, within: float | None = None
) -> tuple[slice, ...]:
    """Where in the batch's output sample i's is, after proof that its output alone is that part.

    `within` is the relative difference that counts as rounding; None: by dtype.
    """
    if batch == 1 and whole.shape == alone.shape:
        return ()
    dims = []
    if whole.dim() == alone.dim():
        dims = [d for d in range(alone.dim()) if whole.shape[d] != alone.shape[d]]
    if len(dims) != 1 or whole.shape[dims[0]] != batch * alone.shape[dims[0]]:
        raise OtherShapes(
            f"the model's output has shape {tuple(whole.shape)} for {batch} samples but "
            f"{tuple(alone.shape)} for one"
        )
    dim = dims[0]
    size = alone.shape[dim]
    for part in (slice(i * size, (i + 1) * size), slice(i, None, batch)):
        index = (slice(None),) * dim + (part,)
        if nearly_equal(whole[index], alone, within):
            return index
    raise NotSeparable(
        f"sample {i} alone gives another output than in the batch: samples are not independent in "
        "this model (statistics over the batch, or routing that depends on it), or the samples are "
        "not where they were looked for"
    )


def parts_by_sample(
    whole: Tensor, alone: Sequence[Tensor], within: float | None = None
) -> list[tuple[slice, ...]]:
    """Locate each sample in the output of a batch, by comparison with samples run one by one.

    Samples may have different numbers of entries, one after the other or padded to one length.

    >>> whole = torch.arange(5.0)
    >>> parts_by_sample(whole, [whole[:3], whole[3:]])
    [(slice(0, 3, None),), (slice(3, 5, None),)]
    """
    if len(alone) == 1:
        return [()]
    ranks = {each.dim() for each in alone}
    if ranks == {whole.dim()}:
        for parts in _ways_to_part(whole, alone):
            pairs = zip(parts, alone, strict=True)
            if all(_begins_with(whole[part], own, within) for part, own in pairs):
                return parts
    raise NotSeparable(
        f"the output of shape {tuple(whole.shape)} for {len(alone)} samples differs from the "
        "outputs of the samples run one by one. Either samples influence each other (statistics "
        "over the batch, a contrastive loss, routing that depends on the batch), or the output is "
        "not in the order of the samples"
    )


def _ways_to_part(whole: Tensor, alone: Sequence[Tensor]) -> Iterator[list[tuple[slice, ...]]]:
    for dim in range(whole.dim()):
        sizes = [each.shape[dim] for each in alone]
        ends = list(itertools.accumulate(sizes))
        before = (slice(None),) * dim
        if ends[-1] == whole.shape[dim]:
            rows = zip(sizes, ends, strict=True)
            yield [(*before, slice(end - size, end)) for size, end in rows]
            yield [(*before, slice(i, None, len(alone))) for i in range(len(alone))]


def _begins_with(part: Tensor, own: Tensor, within: float | None) -> bool:
    """Whether a sample's part begins with its own output; padding may follow."""
    if any(mine > all_ for mine, all_ in zip(own.shape, part.shape, strict=True)):
        return False
    return nearly_equal(part[tuple(slice(size) for size in own.shape)], own, within)


def nearly_equal(a: Tensor, b: Tensor, within: float | None = None) -> bool:
    """Whether two outputs are the same up to rounding, judged by their largest entry.

    What is not finite must be so in both.

    >>> nan, one = float("nan"), torch.ones(2)
    >>> nearly_equal(one * nan, one * nan), nearly_equal(one * nan, one)
    (True, False)
    >>> nearly_equal(one, one + 1e-6)
    True
    """
    a = a.detach()
    b = b.detach()
    if not a.numel():
        return True
    difference = float((a - b).abs().max())
    size = float(a.abs().max())
    if difference == difference and size < float("inf"):
        limit = tolerance(a.dtype) if within is None else within
        return difference <= limit * max(size, 1e-30)
    finite = torch.isfinite(a)
    return torch.equal(finite, torch.isfinite(b)) and nearly_equal(a[finite], b[finite], within)


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference that rounding may cause in a type."""
    return {torch.float64: 1e-8, torch.float32: 1e-3}.get(dtype, 1e-1)
