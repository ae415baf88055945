"""Tensors of the simulated device: each wraps one of the CPU, on which its operations run.

Mixed devices are refused, random numbers come from the device's own generator, and whatever goes to
the host is NaN (99 for integers) until an event behind it was waited for or found to have passed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from device.clock import Clock, Generators

aten = torch.ops.aten
NAME = "simulated"
COUNT = 2
"""Devices there are; tensors are on one of them."""

_READS = {
    aten._local_scalar_dense.default: "item",
    aten.equal.default: "equal",
    aten.nonzero.default: "nonzero",
    aten._unique2.default: "unique",
    aten.bincount.default: "bincount",
    aten.masked_select.default: "masked_select",
}
_MAY_MIX = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


class PinnedMemory:
    """The host's memory that the device can write to while the host goes on."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def add(self, tensor: Tensor) -> Tensor:
        """This tensor's memory is pinned from now on."""
        reference = StorageWeakRef(tensor.untyped_storage())
        self._storages[reference.cdata] = reference
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor, or what it is a view of, is pinned."""
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()


@dataclass
class SimulatedDevice:
    """What the device is like, and what it has done."""

    type: str = NAME
    index: int = 0
    """Of the device that all tensors are on; the current one is always 0."""
    float64: bool = True
    clock: Clock = field(default_factory=Clock)
    generators: Generators = field(default_factory=lambda: Generators(COUNT))
    pinned: PinnedMemory = field(default_factory=PinnedMemory)
    free_bytes: int = 10**12
    recorded: list[tuple[Any, Any, Any, Any]] | None = None
    """The operations of a capture under way."""

    @property
    def device(self) -> torch.device:
        """What tensors say they are on."""
        return torch.device(self.type, self.index)


THE_DEVICE = SimulatedDevice()


class DeviceTensor(Tensor):
    """A tensor of the simulated device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "DeviceTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device(NAME, 0),
        )
        made.held = held  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return THE_DEVICE.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return THE_DEVICE.type == "cuda"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def held(value: Any) -> Any:
    """What runs on the CPU in the place of this value."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type in (NAME, THE_DEVICE.type) else value
    return value.held if isinstance(value, DeviceTensor) else value


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation with a tensor of the device."""
    if func is aten.copy_.default:
        return copy(args[0], args[1], *args[2:], **kwargs)
    target = kwargs.get("device")
    if func is aten._to_copy.default and target is not None and target.type == "cpu":
        host = torch.empty_like(args[0].held, dtype=kwargs.get("dtype") or args[0].dtype)
        return copy(host, args[0], kwargs.get("non_blocking", False))
    if func is aten._to_copy.default and not isinstance(args[0], DeviceTensor):
        return copy(make(aten.empty_like.default, args[0]), args[0], kwargs.get("non_blocking"))
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)
    if func not in _MAY_MIX:
        _refuse_strangers(func, args, kwargs)
    clock = THE_DEVICE.clock
    clock.order(kernel=not _is_view(func))
    if _reads(func, args, kwargs):
        clock.wait(_READS.get(func, "size"))
    plain, named = tree_map(held, (tuple(args), dict(kwargs)))
    out = _draw(func, plain, named)
    _refuse_float64(out)
    if THE_DEVICE.recorded is not None and not _is_view(func):
        THE_DEVICE.recorded.append((func, plain, named, out))
    return return_and_correct_aliasing(func, args, kwargs, tree_map_only(Tensor, DeviceTensor, out))


def make(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """An operation that makes a tensor out of nothing."""
    THE_DEVICE.clock.order()
    plain = tree_map(held, kwargs | {"pin_memory": False})
    made = _draw(func, tree_map(held, args), plain)
    _refuse_float64(made)
    return DeviceTensor(made)


def copy(target: Tensor, source: Tensor, non_blocking: bool | None = False) -> Tensor:
    """Between host and device, or on the device."""
    clock = THE_DEVICE.clock
    clock.order()
    if isinstance(target, DeviceTensor):
        if not isinstance(source, DeviceTensor) and not (
            non_blocking and THE_DEVICE.pinned.holds(source)
        ):
            clock.wait("copy from the host")
        _refuse_float64(target.held)
        target.held.copy_(held(source))
        if THE_DEVICE.recorded is not None:
            plain = (target.held, held(source))
            THE_DEVICE.recorded.append((aten.copy_.default, plain, {}, target.held))
        return target
    value = source.held.clone()  # type: ignore[attr-defined]  # as it is when the device gets there
    # Into pageable memory a copy may wait, whatever is said: so here it always does.
    if not non_blocking or not THE_DEVICE.pinned.holds(target):
        clock.wait("copy to the host")
        return target.copy_(value)
    clock.bring(lambda: target.copy_(value))
    target.fill_(float("nan") if target.is_floating_point() else 99)
    clock.progress()
    return target


def replay(recorded: list[tuple[Any, Any, Any, Any]]) -> None:
    """Run captured operations again on the same memory: no hook of Python's is called."""
    for func, args, kwargs, out in recorded:
        THE_DEVICE.clock.order()
        again = _draw(func, args, kwargs)
        for before, now in zip(tree_leaves(out), tree_leaves(again), strict=True):
            if isinstance(before, Tensor) and before is not now:
                before.copy_(now)


def peek(tensor: Tensor) -> Tensor:
    """A test's look at the device, which nothing counts as a wait."""
    return held(tensor.detach()).clone()


def brought_back(module: torch.nn.Module) -> torch.nn.Module:
    """The module on the CPU."""
    for each in module.modules():
        for entries in (each._parameters, each._buffers):
            for name, tensor in entries.items():
                if tensor is not None:
                    there = peek(tensor)
                    if isinstance(tensor, torch.nn.Parameter):
                        there = torch.nn.Parameter(there, tensor.requires_grad)
                    entries[name] = there  # type: ignore[assignment]
    return module


def moved(module: torch.nn.Module, device: torch.device | str) -> torch.nn.Module:
    """The module on the device; tied parameters stay tied, which `Module.to` does not manage."""
    if torch.device(device).type == "cpu":
        return module
    known: dict[int, torch.nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                if id(parameter) not in known:
                    there = torch.nn.Parameter(parameter.detach().to(device))
                    known[id(parameter)] = there.requires_grad_(parameter.requires_grad)
                each._parameters[name] = known[id(parameter)]
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = buffer.to(device)
    return module


def _draw(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run on the CPU; random numbers come from the generator of the tensors' own device."""
    seeded = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    if not seeded or kwargs.get("generator") is not None:
        return func(*args, **kwargs)
    hosts = torch.get_rng_state()
    states = THE_DEVICE.generators.states
    torch.set_rng_state(states[THE_DEVICE.index])
    try:
        return func(*args, **kwargs)
    finally:
        states[THE_DEVICE.index] = torch.get_rng_state()
        torch.set_rng_state(hosts)


def _is_view(func: Any) -> bool:
    return any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)


def _reads(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host has to know values, or sizes that follow from them."""
    if func is aten.index.Tensor or func is aten.index_put_.default:
        masks = [each for each in args[1] if each is not None and each.dtype is torch.bool]
        return bool(masks)
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return func in _READS


def _refuse_strangers(func: Any, args: Any, kwargs: Any) -> None:
    for each in tree_leaves((args, kwargs)):
        if isinstance(each, Tensor) and not isinstance(each, DeviceTensor) and each.dim():
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{THE_DEVICE.device} and {each.device} ({func})"
            )


def _refuse_float64(out: Any) -> None:
    if THE_DEVICE.float64:
        return
    for each in tree_leaves(out):
        if isinstance(each, Tensor) and each.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"{THE_DEVICE.type} does not support float64")
