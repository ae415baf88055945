"""An accelerator that is not there: PyTorch's PrivateUse1 in pure Python.

As on a GPU, backward runs in a thread of the engine's, host and device do not mix, generators are
the device's own, and work is done later than it is ordered (`Clock`). Stricter than a GPU: a copy
into pageable memory always waits. It can pose as another type, on an index that is not current.

    register()                    once per process, before its first backward pass
    with simulated(speed=300):    then the device is there
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._device import _device_constructors

from device import tensors
from device.clock import Clock, Generators, Speed
from device.tensors import COUNT, NAME, THE_DEVICE, SimulatedDevice, aten

_LIBRARIES: list[torch.library.Library] = []
_LOWER_IN_AUTOCAST = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "convolution")
_DTYPES = [torch.bfloat16, torch.float16]


def register() -> None:
    """Tell autograd's engine that there may be a device: it counts them at its first pass."""
    guard = backend_registration._DummyDeviceGuard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    _KEPT.append(guard)


_KEPT: list[Any] = []


@contextmanager
def simulated(
    speed: Speed = "slow", *, kind: str = NAME, float64: bool = True
) -> Iterator[SimulatedDevice]:
    """The device is there, and lags so far behind.

    kind: what it says it is; "cuda:1" is on the second device while the first one is current.
    """
    _install()
    name, _, index = kind.partition(":")
    THE_DEVICE.type = name
    THE_DEVICE.index = int(index or 0)
    THE_DEVICE.float64 = float64
    THE_DEVICE.clock = Clock(speed)
    THE_DEVICE.generators = Generators(COUNT)
    THE_DEVICE.free_bytes = 10**12
    with _answering():
        try:
            yield THE_DEVICE
        finally:
            THE_DEVICE.clock.speed = "fast"  # whatever is on its way arrives
            THE_DEVICE.clock.progress()


class SimulatedEvent(torch.Event):
    """Passed when the device has come so far.

    As in torch: without a stream it is recorded on the current device's, whatever it was made for,
    and there nothing is to be done.
    """

    def __new__(cls, device: Any = None, **_: Any) -> "SimulatedEvent":
        return super().__new__(cls, NAME)  # type: ignore[call-arg]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.upto = 0

    def record(self, stream: Any = None) -> None:
        index = _current_index() if stream is None else stream.device.index
        self.upto = THE_DEVICE.clock.ordered if index == THE_DEVICE.index else 0

    def query(self) -> bool:
        return THE_DEVICE.clock.passed(self.upto)

    def synchronize(self) -> None:
        THE_DEVICE.clock.wait("event", self.upto)


_current = [0]


def _current_index() -> int:
    return _current[0]


def _index_of(device: Any) -> int:
    if device is None:
        return _current_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _current_index() if index is None else index


def _stream(device: Any = None) -> Any:
    where = torch.device(THE_DEVICE.type, _index_of(device))
    return SimpleNamespace(
        device=where,
        device_index=where.index,
        device_type=where.type,
        is_capturing=lambda: THE_DEVICE.clock.capturing,
    )


def _synchronize(device: Any = None) -> None:
    upto = None if _index_of(device) == THE_DEVICE.index else 0
    THE_DEVICE.clock.wait("synchronize", upto)


def _set_state(state: Tensor, device: Any = None) -> None:
    THE_DEVICE.generators.states[_index_of(device)] = state.clone()


class _DeviceIndex:
    """`torch.accelerator.device_index`."""

    def __init__(self, index: int | None) -> None:
        self._index = index
        self._before = 0

    def __enter__(self) -> None:
        self._before = _current_index()
        if self._index is not None:
            _current[0] = self._index

    def __exit__(self, *_: object) -> None:
        _current[0] = self._before


def _api() -> dict[str, Any]:
    """The functions of the device's module."""
    states = lambda: THE_DEVICE.generators.states  # noqa: E731
    return {
        "is_available": lambda: _is_answering[0],
        "is_initialized": lambda: _is_answering[0],
        "device_count": lambda: COUNT,
        "current_device": _current_index,
        "current_stream": _stream,
        "synchronize": _synchronize,
        "is_current_stream_capturing": lambda: THE_DEVICE.clock.capturing,
        "get_rng_state": lambda device=None: states()[_index_of(device)].clone(),
        "set_rng_state": _set_state,
        "manual_seed_all": lambda seed: THE_DEVICE.generators.seed(seed),
        "manual_seed": lambda seed: THE_DEVICE.generators.seed(seed),
        "get_amp_supported_dtype": lambda: _DTYPES,
        "mem_get_info": lambda device=None: (THE_DEVICE.free_bytes, 2 * THE_DEVICE.free_bytes),
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
    }


_is_answering = [False]


@contextmanager
def _answering() -> Iterator[None]:
    """Torch's functions are asked about this device, and answer for it."""
    accelerator = {
        "current_accelerator": lambda check_available=False: torch.device(THE_DEVICE.type),
        "is_available": lambda: True,
        "device_count": lambda: COUNT,
        "current_device_index": _current_index,
        "current_stream": _stream,
        "synchronize": _synchronize,
        "device_index": _DeviceIndex,
        "get_memory_info": lambda device=None: (THE_DEVICE.free_bytes, 2 * THE_DEVICE.free_bytes),
    }
    _is_answering[0] = True
    try:
        with (
            patch.multiple(torch.accelerator, **accelerator),
            patch.object(torch, "Event", SimulatedEvent),
            patch.object(torch, "empty", _empty(torch.empty)),
            patch.object(Tensor, "is_pinned", lambda tensor, *_: THE_DEVICE.pinned.holds(tensor)),
            patch.object(Tensor, "pin_memory", _pin_memory),
            _posing(),
        ):
            yield
    finally:
        _is_answering[0] = False


@contextmanager
def _posing() -> Iterator[None]:
    """Where the device says that it is of another type, that type's module answers for it."""
    if THE_DEVICE.type == NAME:
        yield
        return
    module = torch.get_device_module(THE_DEVICE.type)
    with patch.multiple(module, create=True, **_api()):
        yield


def _empty(original: Any) -> Any:
    @functools.wraps(original)
    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if not pin_memory:
            return original(*args, **kwargs)
        THE_DEVICE.clock.forbid_in_capture("pinned memory asked for")
        return THE_DEVICE.pinned.add(original(*args, **kwargs))

    return empty


def _pin_memory(tensor: Tensor, *_: Any) -> Tensor:
    THE_DEVICE.clock.forbid_in_capture("pinned memory asked for")
    return THE_DEVICE.pinned.add(tensor.clone())


def _install() -> None:
    """Once per process: the name, kernels that make tensors, and autocast's."""
    if _LIBRARIES:
        return
    _device_constructors()  # remembers torch.empty as it is
    torch.utils.rename_privateuse1_backend(NAME)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module(NAME, SimpleNamespace(**_api()))
    hook = backend_registration._DummyPrivateUse1Hook()
    torch._C._acc.register_python_privateuseone_hook(hook)
    _KEPT.append(hook)
    library = torch.library.Library("aten", "IMPL")
    _LIBRARIES.append(library)
    for func in _factories():
        # Under CUDA's key too: that is where torch sends what is to be on "cuda:1".
        for key in ("PrivateUse1", "CUDA"):
            library.impl(func, functools.partial(tensors.make, func), key)
    copy_from = lambda source, target, later=False: tensors.copy(target, source, later)  # noqa: E731
    library.impl("_copy_from", copy_from, "PrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _LIBRARIES.append(others)
    for name in _LOWER_IN_AUTOCAST:
        func = getattr(aten, name).default
        library.impl(name, functools.partial(_lowered, func), "AutocastPrivateUse1")


def _factories() -> Iterator[Any]:
    """Every operation that makes a tensor out of nothing."""
    for schema in torch._C._jit_get_all_schemas():
        names = {argument.name for argument in schema.arguments}
        types = " ".join(str(argument.type) for argument in schema.arguments)
        makes_one = {"device", "pin_memory"} <= names and "Tensor" not in types
        if schema.name.startswith("aten::") and makes_one:
            packet = getattr(aten, schema.name.removeprefix("aten::"))
            yield getattr(packet, schema.overload_name or "default")


def _lowered(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation that autocast computes in its lower type."""
    dtype = torch.get_autocast_dtype(NAME)

    def lower(value: Any) -> Any:
        wide = isinstance(value, Tensor) and value.dtype is torch.float32
        return value.to(dtype) if wide else value

    with torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    ):
        return func(*map(lower, args), **{name: lower(each) for name, each in kwargs.items()})


@contextmanager
def capturing() -> Iterator[list[Any]]:
    """Record what is ordered in here for `tensors.replay`; it runs once here too."""
    recorded: list[Any] = []
    THE_DEVICE.recorded = recorded
    THE_DEVICE.clock.capturing = True
    try:
        yield recorded
    finally:
        THE_DEVICE.recorded = None
        THE_DEVICE.clock.capturing = False
