# mypy: allow-untyped-calls
"""Real values beside fake tensors, for what is small and known, so that a branch is the true one.

What build() made and what follows from it is computed for real as long as it is small: a mask, the
labels, positions, a constant. A fake storage has a real one beside it, and every view of the one is
a view of the other, so that writes in place reach all that share it. What depends on parameters
is not known; where a step asks for it after all, `assumed_values` says what is assumed.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gradsight.memory.assumed_values import (
    CERTAIN,
    EVEN,
    Reasons,
    assumed,
    keeps_all_layers,
    reasons_after,
)
from gradsight.memory.fake import refuse_sparse
from gradsight.memory.fake_operators import grouped_product, in_true_storage, is_grouped_product

LARGEST = 1 << 20
"""Elements up to which a tensor counts as small."""

aten = torch.ops.aten
UNINITIALISED = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.empty_permuted,
}
ONLY_THE_SHAPE = {
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.rand_like,
    aten.randn_like,
    aten.randint_like,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
}
"""Operators whose results do not depend on the values of the tensor that they are given."""
OVERWRITING = {
    aten.fill_,
    aten.zero_,
    aten.copy_,
    aten.bernoulli_,
    aten.uniform_,
    aten.normal_,
    aten.random_,
}
"""Operators that replace every value of their first argument."""
RESULTS_OF_PYTHON = (aten._local_scalar_dense.default, aten.equal.default)
"""Operators that hand a value to Python."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The real storage beside a fake one."""

    storage: torch.UntypedStorage
    reasons: Reasons
    """What had to be assumed for it; empty where it is certain."""
    fake: "weakref.ref[torch.UntypedStorage]"


class KnownValues(TorchDispatchMode):
    """Knows the values of small tensors. Enter it inside FakeTensorMode, around build and step."""

    def __init__(self, routing: str = EVEN) -> None:
        super().__init__()
        self.routing = routing
        self.stepping = False
        """Whether build() has returned: what is drawn from then on is another number each step."""
        self.paused = False
        """Whether nothing is to be known for a while: of an optimizer's counters, for example."""
        self.read: set[str] = set()
        """The reasons of all assumed values that something was decided by."""
        self._known: dict[int, _Known] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Compiled code is eager in here, and torch's guard against the compiler takes time."""
        return False

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values are known."""
        return self._real(tensor) is not None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)
        if self.paused:
            return func(*args, **(kwargs or {}))
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the wrapper unwraps itself first; its parts come back here
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        refuse_sparse(func, tensors)
        real_args = self._real_arguments(func, args, kwargs, tensors)
        if func in RESULTS_OF_PYTHON and real_args is not None:
            self._note_read(tensors)
            return _computed(func, real_args)
        if real_args is None and func is aten.index.Tensor:
            args = self._without_masks(args)
        if func is aten.embedding.default:
            self._refuse_wrong_index(args[0], args[1])
        try:
            out = grouped_product(*args) if is_grouped_product(func) else func(*args, **kwargs)
        except DynamicOutputShapeException:
            if func in (aten._ctc_loss.Tensor, aten._ctc_loss.default):
                return self._ctc_loss(args)
            if real_args is None:
                raise
            # The number of results is decided by values, as of nonzero.
            self._note_read(tensors)
            return self._faked(_computed(func, real_args), self._reasons(func, args, tensors))
        out = in_true_storage(func, args, out)
        self._learn(func, args, real_args, tensors, out)
        return out

    def _learn(self, func: Any, args: Any, real_args: Any, tensors: Any, out: Any) -> None:
        """Keep the values of what an operator made, or forget what it wrote to."""
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        refuse_sparse(func, made)
        if real_args is None or any(tensor.numel() > LARGEST for tensor in made):
            if func._schema.is_mutable:
                self._forget_written(func, args)
            real = assumed(func, args, out, self.routing)
            if real is not None:
                self._keep(real.tensor, real.value, real.reasons)
            return
        if all(self._key(tensor) in self._known for tensor in made) and not _writes(func):
            return  # views of what is known
        reasons = self._reasons(func, args, tensors)
        results = tree_leaves(_computed(func, real_args))
        if UNIFORM_NAMES.intersection((func._overloadpacket.__name__,)) and self.stepping:
            results = [keeps_all_layers(result) for result in results]
        real_made = [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
        for tensor, value in zip(made, real_made, strict=False):
            self._keep(tensor, value, reasons)

    def _keep(self, tensor: torch.Tensor, value: torch.Tensor, reasons: Reasons) -> None:
        """Put a real storage beside a fake tensor's, if it is laid out in the same way."""
        if not isinstance(tensor, FakeTensor):
            return
        same_place = tensor.stride() == value.stride() and tensor.shape == value.shape
        storage = tensor.untyped_storage()
        real = value.untyped_storage()
        same_size = storage.nbytes() == real.nbytes()
        offset = tensor.storage_offset() == value.storage_offset()
        if not (same_place and same_size and offset and tensor.dtype == value.dtype):
            self._known.pop(storage._cdata, None)
            return
        key = storage._cdata

        def forget(dead: object) -> None:
            # The address of a freed storage is soon another storage's.
            if key in self._known and self._known[key].fake is dead:
                del self._known[key]

        self._known[key] = _Known(real, reasons, weakref.ref(storage, forget))

    def _faked(self, result: Any, reasons: Reasons) -> Any:
        """A real result as fake tensors whose values are known."""

        def faked(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            self._keep(fake, value, reasons)
            return fake

        return tree_map(faked, result)

    def _real_arguments(self, func: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        """The call's arguments with real tensors for the fake ones; None: some are not known."""
        packet = func._overloadpacket
        if packet in UNINITIALISED:
            return None
        if not tensors and not _is_small_factory(func):
            return None
        unneeded = self._unneeded(packet, args)
        known = self._known
        for tensor in tensors:
            is_fake = isinstance(tensor, FakeTensor)
            if is_fake and tensor is not unneeded and self._key(tensor) not in known:
                return None  # the usual case, told without walking through the arguments

        def real(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            known = self._real(value)
            if known is None and value is unneeded:
                return _stand_in(value)
            if known is None:
                raise _Unknown
            return known

        try:
            return tree_map(real, (args, kwargs))
        except _Unknown:
            return None

    def _unneeded(self, packet: Any, args: Any) -> torch.Tensor | None:
        """The argument whose values do not matter for the result."""
        if not args or not isinstance(args[0], torch.Tensor) or args[0].numel() > LARGEST:
            return None
        if isinstance(args[0], torch.nn.Parameter) and packet not in ONLY_THE_SHAPE:
            return None
        if packet in ONLY_THE_SHAPE:
            return args[0]
        whole = args[0].numel() * args[0].element_size() == args[0].untyped_storage().nbytes()
        if packet in OVERWRITING and whole and args[0].is_contiguous():
            return args[0]
        return None

    def _real(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real tensor beside a fake one; a real one is its own.

        Parameters are never known: they are other numbers in every step.
        """
        if isinstance(tensor, torch.nn.Parameter):
            self._known.pop(self._key(tensor), None)
            return None
        if not isinstance(tensor, FakeTensor):
            usable = tensor.layout is torch.strided and tensor.device.type == "cpu"
            if not usable or tensor.numel() > LARGEST:
                return None
            with _disable_current_modes():
                return tensor.detach()
        known = self._known.get(self._key(tensor))
        if known is None:
            return None
        with _disable_current_modes(), torch.no_grad():
            view = torch.empty(0, dtype=tensor.dtype)
            return view.set_(known.storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _key(self, tensor: torch.Tensor) -> int:
        if tensor.layout is not torch.strided:
            return 0
        return int(tensor.untyped_storage()._cdata)

    def _reasons(self, func: Any, args: Any, tensors: Sequence[torch.Tensor]) -> Reasons:
        """What had to be assumed for the result of a call."""
        given: Reasons = CERTAIN
        for tensor in tensors:
            known = self._known.get(self._key(tensor))
            if known is not None:
                given |= known.reasons
        return reasons_after(func, args, given, stepping=self.stepping)

    def _note_read(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            known = self._known.get(self._key(tensor))
            if known is not None:
                self.read |= known.reasons

    def _forget_written(self, func: Any, args: Any) -> None:
        for tensor in _written(func, args):
            self._known.pop(self._key(tensor), None)

    def _without_masks(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Indices with the positions in place of boolean masks that are known."""
        places: list[Any] = []
        for index in args[1]:
            real = None
            if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
                real = self._real(index)
            if real is None:
                places.append(index)
                continue
            self._note_read([index])
            reasons = self._reasons(aten.nonzero.default, (), [index])
            with _disable_current_modes():
                columns = [column.contiguous() for column in real.nonzero().unbind(1)]
            places += [self._faked(column, reasons) for column in columns]
        return (args[0], places)

    def _ctc_loss(self, args: tuple[Any, ...]) -> Any:
        """The shapes of CTC's loss, which depend on the longest of its targets."""
        likelihoods = args[0]
        lengths = args[3]
        if isinstance(lengths, torch.Tensor):
            real = self._real(lengths)
            if real is None:
                raise DynamicOutputShapeException(aten._ctc_loss.Tensor)
            self._note_read([lengths])
            with _disable_current_modes():
                lengths = real.flatten().tolist()
        steps, samples = likelihoods.shape[:2]
        states = 2 * max(lengths, default=0) + 1
        return likelihoods.new_empty(samples), likelihoods.new_empty(samples, steps, states)

    def _refuse_wrong_index(self, weight: torch.Tensor, indices: torch.Tensor) -> None:
        """Fail as a real step does where a token or a position lies beyond its table."""
        real = self._real(indices)
        if real is None or real.numel() == 0:
            return
        with _disable_current_modes():
            largest = int(real.max())
        if largest >= weight.shape[0]:
            raise IndexError(
                f"index out of range: {largest} in an embedding of {weight.shape[0]} rows"
            )


UNIFORM_NAMES = {"rand", "rand_like"}


class _Unknown(Exception):
    """An argument's values are not known."""


def _computed(func: Any, real_args: Any) -> Any:
    """The operator on real tensors, unseen by any mode."""
    args, kwargs = real_args
    with _disable_current_modes(), torch.no_grad():
        return func(*args, **kwargs)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor like a fake one, of whatever values."""
    with _disable_current_modes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def _written(func: Any, args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes to, of those given by position."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _is_small_factory(func: Any) -> bool:
    """Whether an operator without tensors among its arguments makes one."""
    returns = func._schema.returns
    return bool(returns) and all(str(made.type) == "Tensor" for made in returns)
