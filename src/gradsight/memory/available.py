"""How much memory there is, and whether a step can be run in it."""

from pathlib import Path

import torch
from torch import nn

from gradsight.errors import GradsightError
from gradsight.memory.predict import predict_peak_memory
from gradsight.memory.workload import Build
from gradsight.values.sizes import format_size


def available_memory(device: str = "cpu") -> int | None:
    """Bytes that can still be had on a device; None where that cannot be told."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None
    )


def refuse_what_does_not_fit(build: Build, optimizer: str | None, model: nn.Module) -> None:
    """Refuse to run a step on the CPU that would drive the machine out of memory."""
    free = available_memory()
    if free is None or any(p.device.type != "cpu" for p in model.parameters()):
        return
    try:
        needed = predict_peak_memory(build, optimizer=optimizer).peak_bytes
    except GradsightError:
        return  # cannot be predicted; the run itself will tell
    held = 2 * sum(
        p.numel() * p.element_size() for p in model.parameters()
    )  # copies of the gradients, to compare
    if needed + held > free:
        raise GradsightError(
            f"the plain step needs {format_size(needed)}, and {format_size(held)} for the comparison; "
            f"{format_size(free)} is available here. Verify with a smaller batch, or use predict_peak_memory, which "
            "needs no memory"
        )
