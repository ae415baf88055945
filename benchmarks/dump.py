"""What a gradient dump costs: how long training waits, and how fast the bytes reach the disk.

    python benchmarks/dump.py [--megabytes 400] [--rounds 7] [--folder DIR]

Each round measures every way once, one after the other, and the best of all rounds counts: on a shared machine the others
say more about the neighbours. Two loads: one buffer of many tensors as in a GPT, and the same gradients in one process.
"""

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from gradsight import GradientDumper
from gradsight.dump.layout import size
from gradsight.dump.manifest import read


def build(megabytes: int) -> nn.Module:
    """A model shaped like a GPT (one large embedding, blocks of matrices and vectors) with gradients of this size."""
    width = 512
    block = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    blocks = max(1, round((megabytes * 1e6 - 16_000 * width * 4) / (4 * sum(p.numel() for p in block.parameters()))))
    model = nn.ModuleList([nn.Embedding(16_000, width)])
    model.extend(nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(blocks))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


class Bench:
    """The ways to measure, over the same gradients."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        self.bytes = sum(gradient.nbytes for gradient in self.gradients.values())
        self.copies = [torch.empty_like(gradient) for gradient in self.gradients.values()]
        self.raw = memoryview(torch.zeros(self.bytes, dtype=torch.uint8).random_().numpy())
        self.full = GradientDumper(folder / "full", keep_last=1)
        self.sampled = GradientDumper(folder / "sampled", keep_last=1, save_first_n=10)
        self.step = 0

    def copy(self) -> None:
        """A plain copy in memory, tensor by tensor, into memory that was used before."""
        for target, gradient in zip(self.copies, self.gradients.values(), strict=True):
            target.copy_(gradient)

    def write_raw(self) -> None:
        """The same number of bytes, one file, one sequential write, one fsync."""
        path = self.folder / "raw"
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        done = 0
        while done < self.bytes:
            done += os.write(handle, self.raw[done : done + (1 << 26)])
        os.fsync(handle)
        os.close(handle)

    def save_dcp(self) -> None:
        """torch's own synchronous save of the same gradients."""
        dcp.save(self.gradients, checkpoint_id=self.folder / "dcp", no_dist=True)

    def round(self, times: dict[str, list[float]]) -> None:
        """Measure each way once."""
        times["copy"].append(timed(self.copy))
        self.step += 1
        times["stall"].append(timed(lambda: self.full.dump(self.model, self.step)))
        times["rest"].append(timed(self.full.wait))
        times["stall sampled"].append(timed(lambda: self.sampled.dump(self.model, self.step)))
        times["rest sampled"].append(timed(self.sampled.wait))
        times["raw"].append(timed(self.write_raw))
        (self.folder / "raw").unlink()
        times["dcp"].append(timed(self.save_dcp))
        shutil.rmtree(self.folder / "dcp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        report(Bench(build(options.megabytes), folder), options.rounds)
    finally:
        shutil.rmtree(folder)


def report(bench: Bench, rounds: int) -> None:
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds + 1):
        bench.round(times)
    first = times["stall"][0]
    best = {way: min(values[1:]) for way, values in times.items()}
    written = min(a + b for a, b in zip(times["stall"][1:], times["rest"][1:], strict=True))
    per_second = bench.bytes / 1e6
    sizes = [
        size(read(folder)) for kind in ("full", "sampled") for folder in bench.folder.glob(f"{kind}/*/*/*_gradients")
    ]
    print(
        f"{len(bench.gradients)} gradients, {bench.bytes / 1e6:.0f} MB, {torch.get_num_threads()} threads, best of {rounds} rounds"
    )
    print(f"a plain copy in memory          {best['copy'] * 1e3:8.1f} ms")
    print(
        f"training waits for a dump       {best['stall'] * 1e3:8.1f} ms   {best['stall'] / best['copy']:.2f}x the copy (at most 1.3x)"
    )
    print(f"  the first one (new memory)    {first * 1e3:8.1f} ms")
    print(
        f"synchronous dcp.save            {best['dcp'] * 1e3:8.1f} ms   {best['dcp'] / best['stall']:.1f}x the wait (at least 4x)"
    )
    print(f"a dump reaches the disk at      {per_second / written:8.0f} MB/s")
    print(
        f"a raw write with fsync at       {per_second / best['raw']:8.0f} MB/s {best['raw'] / written:.2f}x of it is reached (at least 0.7x)"
    )
    print(f"dcp.save at                     {per_second / best['dcp']:8.0f} MB/s")
    print(
        f"training waits for 10 rows each {best['stall sampled'] * 1e3:8.1f} ms   {best['stall'] / best['stall sampled']:.0f}x less than for all"
    )
    print(
        f"  written in                    {best['rest sampled'] * 1e3:8.1f} ms   {sizes[1] / 1e6:.1f} MB against {sizes[0] / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
