"""How fast the gradients of a 124M-parameter model are measured, against reading the same memory
once.

Everything runs in turn on the same gradients, and the best of several turns counts.

    python benchmarks/norm_statistics.py [--turns 9]
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gradsight.measure.histogram import HistogramReading
from gradsight.measure.norms import NormReading, exact_norms


def gradients() -> list[Tensor]:
    """Shaped as those of GPT-2 Small: 148 tensors, 124.4M entries."""
    width, shapes = 768, [(50257, 768), (1024, 768)]
    for _ in range(12):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [
            (width,),
            (width,),
            (width, 4 * width),
            (4 * width,),
            (4 * width, width),
            (width,),
        ]
    shapes += [(width,), (width,)]
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) * 0.01 for shape in shapes]


def loop(grads: list[Tensor]) -> None:
    """One parameter at a time: the norm, whether anything is NaN, whether all is zero."""
    total = 0.0
    for gradient in grads:
        norm = gradient.norm(2).item()
        total += norm**2
        bool(torch.isnan(gradient).any())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    grads = gradients()
    ways: dict[str, Callable[[], object]] = {
        "sum of each gradient": lambda: [gradient.sum() for gradient in grads],
        "statistics (L2, largest magnitude)": lambda: NormReading(grads).read(),
        "torch._foreach_norm (L2 only)": lambda: torch.stack(torch._foreach_norm(grads)).tolist(),
        "loop: norm and isnan of each": lambda: loop(grads),
        "histograms (sampled)": lambda: HistogramReading(grads).read(),
        "torch.histc of each": lambda: [torch.histc(gradient, 64) for gradient in grads],
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(turns):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - started)
    read, stats, slow, picture, histc = (best[name] for name in list(ways)[:2] + list(ways)[3:])
    entries = sum(gradient.numel() for gradient in grads) / 1e6
    print(f"{entries:.1f}M entries in {len(grads)} tensors, best of {turns}")
    for name, seconds in best.items():
        print(f"  {seconds * 1e3:8.1f} ms  {name}")
    print(f"statistics / one read-only pass:     {stats / read:6.2f}x   (at most 3)")
    print(f"loop / statistics:                   {slow / stats:6.1f}x   (at least 15)")
    print(f"torch.histc of each / histograms:    {histc / picture:6.1f}x   (at least 10)")
    exact, fast = exact_norms(grads), NormReading(grads).read()
    print(
        f"largest relative difference to a loop in float64: {abs(fast.l2 / exact.l2 - 1).max():.1e}"
    )


if __name__ == "__main__":
    main()
