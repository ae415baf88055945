"""Follow the operations that select or reorder rows.

Without such operations (an index, a mask, lengths, sorting), the shapes of tensors determine where
the samples are: their layout. So each tensor has a *path*, a hash of all selections behind it. A
layout that was proven on one path is not trusted on another. A selection by the data can differ in
every batch, so a layout behind it is never trusted.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradsight.core.devices import autocast_kinds
from gradsight.ghost.derivative import function_name

Recipe = Callable[[Tensor], int | None]
"""Returns a hash of how a tensor without samples was made; None for tensors with samples."""

HARMLESS = frozenset(
    {
        # Entry by entry.
        "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "true_divide", "rsub", "neg",
        "floor_divide", "remainder", "fmod", "pow", "abs", "sign", "square", "sqrt", "exp", "log",
        "eq", "ne", "lt", "le", "gt", "ge", "eq_", "ne_", "lt_", "le_", "gt_", "ge_", "isin",
        "isnan", "isinf", "isfinite", "equal", "allclose", "isclose", "maximum", "minimum",
        "clamp", "clamp_", "clip", "clamp_min", "clamp_max", "relu", "lerp", "addcmul", "addcdiv",
        "logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or",
        "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift",
        "masked_fill", "masked_fill_", "fill_", "zero_", "copy_", "nan_to_num", "dropout",
        "to", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int", "short",
        "bool", "byte", "clone", "detach", "contiguous", "requires_grad_",
        # Views and copies that keep the order.
        "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze",
        "expand", "expand_as", "broadcast_to", "broadcast_tensors", "repeat", "tile", "permute",
        "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "pad", "tril", "triu",
        "diagonal", "unfold", "meshgrid", "atleast_1d", "atleast_2d",
        # Sums, and questions of which the answer is an index.
        "sum", "mean", "prod", "any", "all", "max", "min", "amax", "amin", "aminmax", "argmax",
        "argmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "logsumexp", "norm",
        "count_nonzero", "bincount", "histc", "nonzero", "argwhere", "argsort", "searchsorted",
        "bucketize", "diff", "one_hot", "std", "var",
        # What Python asks of a tensor.
        "size", "dim", "ndimension", "numel", "nelement", "stride", "item", "tolist", "numpy",
        "element_size", "data_ptr", "get_device", "untyped_storage", "storage", "storage_offset",
        "__len__", "__bool__", "__int__", "__index__", "__float__", "__repr__", "__format__",
        "__hash__", "__contains__", "__array__", "__deepcopy__", "__reversed__",
        # Layers, attention, losses: integers pick no rows of samples.
        "conv1d", "conv2d", "conv3d", "softmax", "log_softmax", "scaled_dot_product_attention",
        "multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu", "layer_norm",
        "cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "multi_margin_loss",
        "multilabel_margin_loss", "multilabel_soft_margin_loss", "ctc_loss", "soft_margin_loss",
        "gaussian_nll_loss", "poisson_nll_loss", "cross_entropy_loss", "nll_loss_nd",
        # New tensors.
        "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
        "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "backward", "register_hook",
    }
)  # fmt: skip
"""Names of operations that leave every row where it is, whatever integers they are given."""

OPERATORS = frozenset(
    f"__{sign}{name}__"
    for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
        "rshift",
    )
    for sign in ("", "r", "i")
) | {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__invert__", "__abs__",
     "__pos__"}  # fmt: skip
"""Python's operators, all of them entry by entry."""

ALONG_A_DIMENSION = {
    "index_select": (1, 2), "index_add": (1, 2), "index_add_": (1, 2), "index_copy": (1, 2),
    "index_copy_": (1, 2), "index_fill": (1, 2), "index_fill_": (1, 2), "index_reduce": (1, 2),
    "index_reduce_": (1, 2), "gather": (1, 2), "scatter": (1, 2), "scatter_": (1, 2),
    "scatter_add": (1, 2), "scatter_add_": (1, 2), "scatter_reduce": (1, 2),
    "scatter_reduce_": (1, 2), "take_along_dim": (2, 1),
}  # fmt: skip
"""Operations that select by an index along a dimension: positions of `dim` and `index`."""

SORTING = {"sort": 1, "msort": None, "topk": 2, "kthvalue": 2, "mode": 1}
"""Operations that sort entries: the position of `dim`; None: the dimension is 0."""
SORTED_BY_DEFAULT = -1

PRODUCTS = {
    "mm": (0, 1), "matmul": (0, 1), "bmm": (0, 1), "__matmul__": (0, 1), "__rmatmul__": (1, 0),
    "addmm": (1, 2), "baddbmm": (1, 2), "mv": (0, 1),
}  # fmt: skip
"""Matrix products: positions of the left and the right operand."""

CUTTING = {
    "cat": 1, "concat": 1, "concatenate": 1, "stack": 1, "vstack": None, "unbind": 1, "chunk": 2,
    "split": 2, "split_with_sizes": 2, "tensor_split": 2, "narrow": 1, "select": 1, "flip": 1,
    "roll": 2,
}  # fmt: skip
"""Operations that split or join at Python ints: the position of `dim`; None: it is 0."""

DRAWING = frozenset(
    {
        "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like",
        "bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "poisson", "uniform_",
        "exponential_", "geometric_", "cauchy_", "log_normal_", "random_", "rrelu", "rrelu_",
        "native_dropout", "dropout_", "alpha_dropout_", "feature_dropout_",
        "feature_alpha_dropout_", "fractional_max_pool2d", "fractional_max_pool3d", "binomial",
        "gumbel_softmax",
    }
)  # fmt: skip
"""Functions that draw random numbers: no two calls give the same tensor."""

_unique = itertools.count(1)


class Picked(NamedTuple):
    """The row selections that produced a tensor."""

    path: int = 0
    """A hash of all of them; 0 without any."""
    by_values: str | None = None
    """The first one that depends on the data, as a name for users; None without one."""


NOT_PICKED = Picked()


class RowMoves:
    """The row selections of one pass."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._batch = 1
        self._tensors: dict[int, tuple[weakref.ref[Tensor], Picked]] = {}
        self._storages: dict[int, Picked] = {}
        """Memory that selected rows were written to, for all its views."""
        self.is_empty = True
        """Whether no rows were picked so far."""
        self.harmless = _harmless
        """Operations that were met and pick none."""

    def begin(self, batch: int) -> None:
        """A call of the model begins; its arguments are the samples, however they were selected."""
        self._batch = batch
        self.release()

    def release(self) -> None:
        """Let go of everything."""
        self.is_empty = True
        self._tensors.clear()
        self._storages.clear()

    def of(self, tensors: Iterable[Tensor]) -> Picked:
        """Return the row selections behind some tensors."""
        found = NOT_PICKED
        if self.is_empty:
            return found
        for x in tensors:
            entry = self._tensors.get(id(x))
            if entry is not None and entry[0]() is x:
                found = _joined(found, entry[1])
            if self._storages:
                found = _joined(found, self._storages.get(memory_of(x), NOT_PICKED))
        return found

    def note(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
    ) -> Picked:
        """Return the row selections behind the result of an operation on these tensors."""
        before = self.of(tensors)
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = _kind_of(function_name(func))
        if kind == "harmless":
            _harmless.add(func)
            return before
        own = self._of_call(kind, function_name(func), args, kwargs)
        return before if own is None else _joined(before, own)

    def mark(self, tensors: Iterable[Tensor], picked: Picked) -> None:
        """The results of an operation."""
        self.is_empty = False
        for x in tensors:
            self._tensors[id(x)] = (weakref.ref(x), picked)

    def mark_memory(self, tensor: Tensor, picked: Picked) -> None:
        """A tensor that an operation has changed."""
        self.is_empty = False
        self._storages[memory_of(tensor)] = picked

    def _of_call(
        self, kind: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Picked | None:
        if kind == "index":
            return self._note_index(name, args[0], args[1])
        if kind == "along":
            at, index_at = ALONG_A_DIMENSION[name]
            index = _given(args, kwargs, index_at, "index", "indices")
            return self._note_along(name, args[0], _given(args, kwargs, at, "dim"), index)
        if kind == "sorting":
            place = SORTING[name]
            dim = 0 if place is None else _given(args, kwargs, place, "dim")
            return self._note_sorting(name, args[0], SORTED_BY_DEFAULT if dim is None else dim)
        if kind == "cutting":
            return self._note_cut(name, args, kwargs)
        if kind == "table":
            return self._note_lookup(name, args, kwargs)
        if kind == "product":
            left, right = (args[place] for place in PRODUCTS[name])
            return self._note_product(name, [left, right], _equation(left, right))
        if kind == "einsum":
            return self._note_einsum(name, args)
        return self._note_other(name, args, kwargs)

    def _note_index(self, name: str, tensor: Tensor, index: Any) -> Picked | None:
        """x[index], or x[index] = y."""
        if self._recipe(tensor) is not None and name == "__getitem__":
            return None  # a table without samples
        dim = 0
        shape = tuple(tensor.shape)
        items = index if isinstance(index, tuple) else (index,)
        consumed = sum(_dimensions(each) for each in items)
        facts: list[Any] = []
        for each in items:
            if each is Ellipsis:
                dim += len(shape) - consumed
                continue
            dims = range(dim, dim + _dimensions(each))
            dim += _dimensions(each)
            if isinstance(each, slice) and each == slice(None):
                continue
            if isinstance(each, Tensor) and self._recipe(each) is None:
                if any(self._may_hold_samples(shape, d) for d in dims):
                    return _by_values(name)
            elif any(self._likely_holds_samples(shape, d) for d in dims):
                facts.append(described_value(each, self._recipe))
        return _by_numbers(name, shape, *facts) if facts else None

    def _note_along(self, name: str, tensor: Tensor, dim: Any, index: Any) -> Picked | None:
        shape = tuple(tensor.shape)
        if not isinstance(dim, int) or not shape:
            return _by_values(name)  # as take_along_dim without a dimension: of all entries
        if not self._may_hold_samples(shape, dim % len(shape)):
            return None
        recipe = self._recipe(index) if isinstance(index, Tensor) else None
        return _by_values(name) if recipe is None else _by_numbers(name, shape, dim, recipe)

    def _note_sorting(self, name: str, tensor: Tensor, dim: int) -> Picked | None:
        shape = tuple(tensor.shape)
        holds = bool(shape) and self._may_hold_samples(shape, dim % len(shape))
        return _by_values(name) if holds and self._recipe(tensor) is None else None

    def _note_cut(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Picked | None:
        place = CUTTING[name]
        dim = 0 if place is None else _given(args, kwargs, place, "dim", "axis", "dims")
        if dim is None:
            dim = 0
        tensors = [x for x in _leaves(args[:1]) if isinstance(x, Tensor)]
        with_samples = [x for x in tensors if self._recipe(x) is None]
        if not with_samples:
            return None
        first = with_samples[0]
        if isinstance(dim, int) and first.dim():
            inside = dim % (first.dim() + (name == "stack"))
            if not self._likely_holds_samples(tuple(first.shape), inside):
                return None
        shapes = [tuple(x.shape) for x in tensors]
        return _by_numbers(name, *shapes, described_value((args[1:], dict(kwargs)), self._recipe))

    def _note_lookup(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Picked | None:
        """Rows of a table, by ids: the result has the samples where the ids have them."""
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
        tables = [x for x in tensors if x.is_floating_point()]
        offsets = _given(args, kwargs, 2, "offsets")
        if any(self._recipe(table) is None for table in tables):
            return _by_values(name)
        if name == "embedding_bag" and isinstance(offsets, Tensor):
            recipe = self._recipe(offsets)
            return _by_values(name) if recipe is None else _by_numbers(name, recipe)
        return None

    def _note_einsum(self, name: str, args: Sequence[Any]) -> Picked | None:
        operands = _leaves(args[1:])
        if not isinstance(args[0], str) or "." in args[0]:
            return None
        given, _, made = args[0].replace(" ", "").partition("->")
        return self._note_product(name, operands, (given.split(","), made))

    def _note_product(
        self, name: str, operands: Sequence[Any], equation: tuple[Sequence[str], str]
    ) -> Picked | None:
        """A product that sums over samples, such as a one-hot dispatch matrix for experts.

        equation: a letter for each dimension of the operands, and of the result.
        """
        letters, made = equation
        with_samples = [
            (x, names)
            for x, names in zip(operands, letters, strict=False)
            if isinstance(x, Tensor) and x.dim() == len(names) and self._recipe(x) is None
        ]
        if len(with_samples) < 2:
            return None
        first = {names[:1] for _, names in with_samples}
        sizes = {n: x.shape[d] for x, names in with_samples for d, n in enumerate(names)}
        if len(first) == 1 and (kept := first.pop()) in made and sizes[kept] % self._batch == 0:
            return None  # each sample has a product of its own
        summed = [size for letter, size in sizes.items() if letter not in made]
        return _by_values(name) if any(size % self._batch == 0 for size in summed) else None

    def _note_other(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Picked | None:
        """An operation that is not known: integers of the batch may pick rows in it."""
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
        whole = [x for x in tensors if not x.is_floating_point() and not x.is_complex()]
        if not whole or all(self._recipe(x) is not None for x in tensors):
            return None
        recipes = [self._recipe(x) for x in whole]
        if any(recipe is None for recipe in recipes):
            return _by_values(name)
        return _by_numbers(name, *(tuple(x.shape) for x in tensors), *recipes)

    def _likely_holds_samples(self, shape: tuple[int, ...], dim: int) -> bool:
        """Like `_may_hold_samples`, but only dimension 0 if that fits the batch.

        Models slice heads and widths with Python ints. These slices can differ between training and
        evaluation (a KV cache), and do not select samples.
        """
        in_first = shape[0] % self._batch == 0
        return self._may_hold_samples(shape, dim) and (dim == 0 or not in_first)

    def _may_hold_samples(self, shape: tuple[int, ...], dim: int) -> bool:
        """Whether the samples could be in this dimension."""
        if dim == 0:
            return True
        if dim >= len(shape):
            return False
        if shape[0] == self._batch or shape[0] % self._batch == 0:
            return shape[dim] == self._batch
        return shape[dim] % self._batch == 0


def memory_of(tensor: Tensor) -> int:
    """A number for a tensor's memory, the same for all views of it; 0 where it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return 0


def _joined(a: Picked, b: Picked) -> Picked:
    if a.path == b.path or not b.path:
        return a
    if not a.path:
        return b
    return Picked(hash((a.path, b.path)) or 1, a.by_values or b.by_values)


def _by_numbers(*facts: Any) -> Picked:
    """A selection by Python numbers or constants."""
    return Picked(hash(facts) or 1)


def _by_values(name: str) -> Picked:
    readable = {"__getitem__": "an index or mask", "__setitem__": "an indexed assignment"}
    return Picked(next(_unique), readable.get(name, name))


def described_value(value: Any, recipe: Recipe | None = None) -> int:
    """A number that stands for arguments; two values with different contents differ in it."""
    if isinstance(value, Tensor):
        found = None if recipe is None else recipe(value)
        return next(_unique) if found is None else found
    if isinstance(value, np.ndarray):
        return hash((value.shape, str(value.dtype), value.tobytes()))
    if isinstance(value, list | tuple):
        return hash((type(value).__name__, *(described_value(each, recipe) for each in value)))
    if isinstance(value, dict):
        return hash(tuple((name, described_value(each, recipe)) for name, each in value.items()))
    if isinstance(value, slice):
        bounds = (value.start, value.stop, value.step)
        return hash(("slice", *(described_value(each, recipe) for each in bounds)))
    if isinstance(value, _PLAIN) or value is None or value is Ellipsis:
        return hash((type(value).__name__, str(value)))
    return next(_unique)


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, np.generic,
          torch.memory_format)  # fmt: skip


def _kind_of(name: str) -> str:
    if name in HARMLESS or name in OPERATORS or name.startswith("is_") or name.endswith("__get__"):
        return "harmless"
    if name in {"__getitem__", "__setitem__"}:
        return "index"
    if name in ALONG_A_DIMENSION:
        return "along"
    if name in SORTING:
        return "sorting"
    if name in CUTTING:
        return "cutting"
    if name in autocast_kinds():  # a copy to a device: x.cpu()
        return "harmless"
    if name in {"embedding", "embedding_bag"}:
        return "table"
    if name in PRODUCTS:
        return "product"
    if name == "einsum":
        return "einsum"
    return "harmless" if name in {"where", "linear"} else "other"


_kinds: dict[Callable[..., Any], str] = {}
_harmless: set[Callable[..., Any]] = set()


def _equation(left: Any, right: Any) -> tuple[Sequence[str], str]:
    """The letters of a product of matrices, in batches where there are more dimensions."""
    rank_left = left.dim() if isinstance(left, Tensor) else 0
    rank_right = right.dim() if isinstance(right, Tensor) else 0
    batches = "abcdefgh"
    names_left = batches[: rank_left - 2] + "ik" if rank_left > 1 else "k"
    names_right = batches[: rank_right - 2] + "kj" if rank_right > 1 else "k"
    return (names_left, names_right), f"{batches}ij"


def _dimensions(index: Any) -> int:
    """How many dimensions of a tensor one item of an index stands for."""
    if index is None or index is Ellipsis or isinstance(index, bool):
        return 0
    if isinstance(index, Tensor | np.ndarray) and str(index.dtype).endswith(("bool", "uint8")):
        return index.ndim
    return 1


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, *names: str) -> Any:
    if len(args) > place:
        return args[place]
    return next((kwargs[name] for name in names if name in kwargs), None)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in _leaves(each)]
    if isinstance(value, Mapping):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    return [value]
