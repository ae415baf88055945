"""What a look at the gradients costs the host in the sequence that an accelerator takes, however
fast the device is: kernels and time per look, for 148 small gradients.

The sequence runs on CPU tensors, which count as an accelerator's here: so the time holds the work
of the kernels too, and is an upper bound. "as it was" is the sequence of version 0.1: five
operations per gradient.

    python benchmarks/look_costs.py [--turns 60]
"""

import argparse
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradsight.measure import norms
from gradsight.measure.clipping import ClipProbe
from gradsight.measure.norms import NormReading

GRADIENTS = 148
ENTRIES = 64


class Counting(TorchDispatchMode):
    """Counts the operations that are no views; a foreach operation is one."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        returns = func._schema.returns
        is_view = any(each.alias_info and not each.alias_info.is_write for each in returns)
        self.kernels += not is_view
        return func(*args, **(kwargs or {}))


def as_it_was(gradients: list[Tensor]) -> None:
    """Smallest, largest and the norm in float64, one gradient at a time."""
    scalars: list[Tensor] = []
    for gradient in gradients:
        smallest, largest = torch.aminmax(gradient)
        square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        scalars += [square, smallest.double(), largest.double()]
    torch.stack(scalars)


def look(gradients: list[Tensor]) -> None:
    """The norms and largest entries of all, and the clip probe's second look at a few."""
    with patch.object(norms, "is_accelerator", lambda device: True):
        reading = NormReading(gradients)
    with patch.object(NormReading, "is_from_device", property(lambda reading: True)):
        ClipProbe(reading, None, gradients.__getitem__)


def on_the_cpu(gradients: list[Tensor]) -> None:
    """The sequence that the CPU takes, with its clip probe."""
    reading = NormReading(gradients)
    reading.read()
    ClipProbe(reading, None, gradients.__getitem__)


def milliseconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=60)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    gradients = [torch.randn(ENTRIES) for _ in range(GRADIENTS)]
    ways = {"as it was": as_it_was, "accelerator's sequence": look, "CPU's sequence": on_the_cpu}
    best = dict.fromkeys(ways, float("inf"))
    with torch.no_grad():
        # In turn, so that all of them meet the same load of the machine.
        for _ in range(turns):
            for name, way in ways.items():
                best[name] = min(best[name], milliseconds(lambda way=way: way(gradients)))
        for name, way in ways.items():
            with Counting() as counting:
                way(gradients)
            print(f"{name}: {counting.kernels} kernels, {best[name]:.2f} ms per look")


if __name__ == "__main__":
    main()
