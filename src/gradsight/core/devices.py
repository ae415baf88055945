# mypy: allow-untyped-calls
"""The one place that knows kinds of devices: everything else asks here, or goes by tensors.

A device is reached by `torch.accelerator`, its own module (`torch.get_device_module`), events and
tensors; so whatever answers for these can be watched, and a simulated device tests it all.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gradsight.errors import UsageError

GPU = "cuda"
"""The kind that the trainer and the memory commands mean by a GPU."""
_WITHOUT_NUMBERS = ("cpu", "meta")
_BACKENDS = {GPU: "nccl", "xpu": "xccl", "hpu": "hccl", "npu": "hccl"}
"""By kind of device: what its processes talk through."""


def is_accelerator(device: torch.device) -> bool:
    """Whether work on this device is ordered now and done later."""
    return device.type not in _WITHOUT_NUMBERS


def accelerators(tensors: Iterable[Tensor]) -> list[torch.device]:
    """The accelerators that these tensors are on, each once."""
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return [device for device in devices if is_accelerator(device)]


def accelerator() -> str | None:
    """The kind of this machine's accelerator; None where there is none."""
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        return None
    return device.type


# Numbers on their way to the host.


def host_memory(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host that a copy from this device can go to while the host goes on."""
    pinned = is_accelerator(device)
    try:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)
    except (RuntimeError, NotImplementedError):
        # A kind that has no pinned memory: the copy waits, and the numbers are right.
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def sent_to(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device, without waiting for it."""
    if not is_accelerator(device):
        return numbers
    staged = host_memory(numbers.shape, numbers.dtype, device)
    staged.copy_(numbers)
    return staged.to(device, non_blocking=True)


def record_event(device: torch.device) -> torch.Event:
    """An event behind all that was ordered on this device so far."""
    event = torch.Event(device)
    stream = _stream_of(device)
    # Without a stream it would be recorded on the current device's, and pass at once.
    if stream is None:
        event.record()
    else:
        event.record(stream)
    return event


def _stream_of(device: torch.device) -> Any:
    try:
        return torch.accelerator.current_stream(device)
    except (RuntimeError, ValueError, NotImplementedError):
        # Not the kind that torch takes for this machine's, or one that has a single stream.
        current = getattr(torch.get_device_module(device), "current_stream", None)
        return None if current is None else current(device)


def is_anything_capturing() -> bool:
    """Whether a graph is being captured on the current device."""
    # Asked at the border, where nothing may be raised: a build may lack what it announces.
    with suppress(Exception):
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return True
    with suppress(Exception):
        kind = accelerator()
        return kind is not None and _is_captured(torch.device(kind))
    return False


def _is_captured(device: torch.device) -> bool:
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    if asked is not None:
        return bool(asked())
    asked = getattr(_stream_of(device), "is_capturing", None)
    return asked is not None and bool(asked())


# What a device can do.


def widest_float(device: torch.device) -> torch.dtype:
    """float64 where the device has it, else float32."""
    if not is_accelerator(device):
        return torch.float64
    try:
        torch.zeros((), device=device).to(torch.float64)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def autocast_kinds() -> list[str]:
    """The kinds of devices that autocast can be on for: the accelerator's first."""
    device = torch.accelerator.current_accelerator()
    return ["cpu"] if device is None else [device.type, "cpu"]


# Generators.


def generator_devices() -> list[torch.device]:
    """The accelerators whose generators may have been used."""
    kind = accelerator()
    if kind is None:
        return []
    module = torch.get_device_module(torch.device(kind))
    # Asking for a state initialises the device, which costs memory and forbids forking.
    if not getattr(module, "is_initialized", lambda: True)():
        return []
    return [torch.device(kind, number) for number in range(torch.accelerator.device_count())]


def generator_state(device: torch.device) -> Tensor:
    """The state of torch's generator for a device."""
    if not is_accelerator(device):
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    try:
        state: Tensor = module.get_rng_state(device)
    except TypeError:  # a kind of which there is only one takes no device
        state = module.get_rng_state()
    return state


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Put torch's generator for a device into a state."""
    if not is_accelerator(device):
        torch.set_rng_state(state)
        return
    module = torch.get_device_module(device)
    try:
        module.set_rng_state(state, device)
    except TypeError:
        module.set_rng_state(state)


def can_draw(device: torch.device) -> bool:
    """Whether this machine has the device, and so a generator for it."""
    if not is_accelerator(device):
        return True
    with suppress(RuntimeError, AttributeError):
        return bool(torch.get_device_module(device).is_available())
    return False


# Memory.


def free_bytes(device: torch.device) -> int | None:
    """What can still be had on an accelerator; None where that cannot be told."""
    memory = _memory_info(device)
    return None if memory is None else memory[0]


def total_bytes(device: torch.device) -> int | None:
    """What an accelerator has in all; None where that cannot be told."""
    memory = _memory_info(device)
    return None if memory is None else memory[1]


def _memory_info(device: torch.device) -> tuple[int, int] | None:
    with suppress(RuntimeError, AttributeError, AssertionError, NotImplementedError, ValueError):
        module = torch.get_device_module(device)
        if not module.is_available():
            return None
        free, total = module.mem_get_info(*([device] if device.index is not None else []))
        return int(free), int(total)
    return None


def has_gpu() -> bool:
    """Whether there is a GPU whose allocator counts."""
    return torch.cuda.is_available()


def allocator_figures() -> dict[str, float]:
    """What the current GPU's allocator holds now, has reserved, and held at its peak; in bytes."""
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "max_allocated": torch.cuda.max_memory_allocated(),
    }


def reset_allocator_peak() -> None:
    """Begin to look for a new peak, where a GPU is in use already."""
    # Asked first, since resetting would initialise it, which takes memory and forbids forking.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


# Where the trainer trains.


def gpu_count() -> int:
    """How many GPUs this process sees."""
    return torch.cuda.device_count()


def pick_device(wanted: str) -> torch.device:
    """The device of this process of the trainer's: of a GPU its local rank's."""
    if wanted == GPU and not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: this torch sees no GPU. Use --device cpu, or install a CUDA build of "
            "torch"
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count()
    if local >= gpus:
        raise UsageError(
            f"{local + 1} processes on this machine, but only {gpus} GPUs: start fewer"
        )
    torch.cuda.set_device(local)
    return torch.device(GPU, local)


def backend_of(device: torch.device) -> str:
    """What processes on this kind of device talk through."""
    return _BACKENDS.get(device.type, "gloo")
