"""Which autocast is on, and how to have the same again."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from gradsight.core.devices import autocast_kinds


def autocast_dtype(device: str) -> torch.dtype | None:
    """The type that autocast computes in on this kind of device now; None where it is off."""
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def current_autocast() -> tuple[str, str] | None:
    """Device type and dtype name of the autocast that is on; None where none is.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     current_autocast()
    ('cpu', 'bfloat16')
    """
    for device in autocast_kinds():
        dtype = autocast_dtype(device)
        if dtype is not None:
            return device, str(dtype).removeprefix("torch.")
    return None


def is_autocast_to(dtype: torch.dtype) -> bool:
    """Whether autocast to this type is on, on the CPU or on the accelerator."""
    return any(autocast_dtype(device) is dtype for device in autocast_kinds())


def autocast_to(device: str, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast to this type, off for None, without its cache: what is cached outlives the pass."""
    return torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


@contextmanager
def autocast_as(wanted: tuple[str, str] | None, devices: Iterable[str]) -> Iterator[None]:
    """The autocast that `current_autocast` gave, and none on the other kinds of device."""
    kinds = set(devices)
    if wanted is not None:
        kinds.add(wanted[0])
    with ExitStack() as stack:
        for device in sorted(kinds):
            if not torch.amp.is_autocast_available(device):
                continue
            dtype = None
            if wanted is not None and wanted[0] == device:
                dtype = getattr(torch, wanted[1].removeprefix("torch."))
            stack.enter_context(autocast_to(device, dtype))
        yield
