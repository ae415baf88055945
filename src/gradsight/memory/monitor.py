"""Memory while training runs: what the process and the device hold, and what is still available."""

import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from gradsight.core.devices import allocator_figures, free_bytes, has_gpu, total_bytes
from gradsight.memory.cuda import is_cuda
from gradsight.memory.storages import storages
from gradsight.values.steps import ScalarTracker, check_tracker
from gradsight.values.whole_numbers import whole_number


class MemoryMonitor:
    """Logs memory every `log_every` steps, in GB of 1e9 bytes.

    On CUDA: memory/gpu_allocated_gb, memory/gpu_reserved_gb and memory/gpu_max_allocated_gb, as
    CUDA's allocator has them. Elsewhere: memory/rss_gb and memory/peak_rss_gb of the process, and
    memory/tensor_gb, the live tensors that Python knows with their gradients; activations that only
    autograd holds are in the process, but not among those.

    log_every: how many steps there are from one sample to the next.
    """

    def __init__(self, log_every: int = 1) -> None:
        self.log_every = whole_number(log_every, "log_every", least=1)

    def sample(self, tracker: ScalarTracker | None, step: int) -> dict[str, float]:
        """Log and return the scalars of this step; nothing where it is not due."""
        if whole_number(step, "step") % self.log_every:
            return {}
        if tracker is not None:
            check_tracker(tracker)
        scalars = gpu_memory() if has_gpu() else process_memory()
        if tracker is not None:
            for name, value in scalars.items():
                tracker.log_scalar(name, value, step)
        return scalars


def gpu_memory() -> dict[str, float]:
    """The figures of CUDA's allocator for the current device."""
    return {f"memory/gpu_{name}_gb": size / 1e9 for name, size in allocator_figures().items()}


def process_memory() -> dict[str, float]:
    """The resident memory of this process, now and at its peak, and the tensors in it."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    now = _resident() or peak
    return {
        "memory/rss_gb": now / 1e9,
        "memory/peak_rss_gb": max(peak, now) / 1e9,
        "memory/tensor_gb": tensor_bytes() / 1e9,
    }


def available_memory(device: str = "cpu") -> int | None:
    """Bytes that can still be had on a device; None where that cannot be told."""
    if is_cuda(device):
        return free_bytes(torch.device(device))
    return _system_memory().get("MemAvailable")


def total_memory(device: str = "cpu") -> int | None:
    """Bytes that a device has in all, with the machine's swap; None where that cannot be told."""
    if is_cuda(device):
        return total_bytes(torch.device(device))
    system = _system_memory()
    if "MemTotal" not in system:
        return None
    limits = [system["MemTotal"] + system.get("SwapTotal", 0)]
    # What the process alone may have, and what its container may.
    limits.append(resource.getrlimit(resource.RLIMIT_AS)[0])
    with suppress(OSError, ValueError):  # no container, or one that says "max"
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limit for limit in limits if limit != resource.RLIM_INFINITY)


def _system_memory() -> dict[str, int]:
    """Linux's figures on the machine's memory, in bytes; empty elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    named = [line.split(":") for line in lines]
    return {name: int(value.split()[0]) * 1024 for name, value in named}


def _resident() -> int | None:
    """Resident bytes of this process; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * resource.getpagesize()


def tensor_bytes() -> int:
    """Bytes of all live tensors that Python knows, each storage once, and of their gradients.

    Tensors without memory, such as torch.compile leaves behind, do not count; some of them even
    have no fixed size.
    """
    sizes: dict[int, int] = {}
    for tensor in _live_tensors():
        if tensor.device.type != "meta":
            sizes.update((storage._cdata, storage.nbytes()) for storage in storages(tensor))
    return sum(size for size in sizes.values() if isinstance(size, int))


def _live_tensors() -> Iterator[torch.Tensor]:
    """The tensors that the garbage collector knows, and their gradients."""
    for thing in gc.get_objects():
        # isinstance would read __class__, and torch.distributed.reduce_op answers that with a
        # warning.
        kind = type(thing)
        if not issubclass(kind, torch.Tensor) or issubclass(kind, FakeTensor | FunctionalTensor):
            continue
        yield thing
        if thing.is_leaf and thing.grad is not None:
            yield thing.grad
