"""What a gradient dump costs: how long training waits, and how fast the bytes reach the disk.

    python benchmarks/dump.py [--megabytes 400] [--rounds 7] [--folder DIR]

Each round measures every way once, one after the other, and the best of all rounds counts: on a
shared machine the rest says more about the neighbours. The first round, with new memory, is told
apart.
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
from gradsight.dump.folders import size
from gradsight.dump.manifest import read


def build(megabytes: int) -> nn.Module:
    """A model shaped like a GPT (one large embedding, blocks of matrices and vectors) with
    gradients of this size.
    """
    width = 512
    block = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    blocks = max(
        1,
        round(
            (megabytes * 1e6 - 16_000 * width * 4)
            / (4 * sum(p.numel() for p in block.parameters()))
        ),
    )
    model = nn.ModuleList([nn.Embedding(16_000, width)])
    model.extend(
        nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(blocks)
    )
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
        self.model = model
        self.folder = folder
        self.gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        self.bytes = sum(gradient.nbytes for gradient in self.gradients.values())
        self.copies = [torch.empty_like(gradient) for gradient in self.gradients.values()]
        self.raw = memoryview(torch.zeros(self.bytes, dtype=torch.uint8).random_().numpy())
        self.full = GradientDumper(folder / "full")
        self.sampled = GradientDumper(folder / "sampled", save_first_n=10)
        self.step = 0
        self.size: dict[str, int] = {}

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

    def dump(self, times: dict[str, list[float]], dumper: GradientDumper, kind: str) -> None:
        """One dump: what training waits for, and how long until it is complete."""
        self.step += 1
        waiting = timed(lambda: dumper.dump(self.model, self.step))
        times[f"{kind} stall"].append(waiting)
        times[f"{kind} all"].append(waiting + timed(dumper.wait))
        self.size[kind] = size(
            read(self.folder / kind / f"gradient_dumper/step{self.step}/{kind}_gradients")
        )
        self.clear(self.folder / kind)

    def round(self, times: dict[str, list[float]]) -> None:
        """Measure each way once; what was written is removed outside of the measured time."""
        times["copy"].append(timed(self.copy))
        self.dump(times, self.full, "full")
        times["raw"].append(timed(self.write_raw))
        self.clear(self.folder / "raw")
        self.dump(times, self.sampled, "sampled")
        times["dcp"].append(timed(self.save_dcp))
        self.clear(self.folder / "dcp")

    def clear(self, path: Path) -> None:
        """Remove what was written, and let the disk come to rest."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        os.sync()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    """Print what was measured, each figure beside its goal."""
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds + 1):
        bench.round(times)
    best = {way: min(values[1:]) for way, values in times.items()}
    copy, stall, whole = best["copy"], best["full stall"], best["full all"]
    rate = {way: bench.bytes / 1e6 / best[way] for way in ("full all", "raw", "dcp")}
    count, threads = len(bench.gradients), torch.get_num_threads()
    print(
        f"{count} gradients, {bench.bytes / 1e6:.0f} MB, {threads} threads, best of {rounds} rounds"
    )
    line("a plain copy in memory", copy * 1e3, "ms")
    line(
        "training waits for a dump",
        stall * 1e3,
        "ms",
        f"{stall / copy:.2f}x the copy (goal: at most 1.3x)",
    )
    line("  the first time, new memory", times["full stall"][0] * 1e3, "ms")
    line(
        "synchronous dcp.save",
        best["dcp"] * 1e3,
        "ms",
        f"{best['dcp'] / stall:.1f}x the wait (goal: at least 4x)",
    )
    line("a dump is complete after", whole * 1e3, "ms")
    line(
        "it is written at",
        rate["full all"],
        "MB/s",
        f"{best['raw'] / whole:.2f}x of raw (goal: at least 0.7x)",
    )
    line("a raw write with fsync", rate["raw"], "MB/s")
    line("dcp.save", rate["dcp"], "MB/s")
    line(
        "training waits for 10 rows each",
        best["sampled stall"] * 1e3,
        "ms",
        f"{best['sampled stall'] / stall:.2f}x the full dump",
    )
    line(
        "they are complete after",
        best["sampled all"] * 1e3,
        "ms",
        f"{best['sampled all'] / whole:.2f}x the full dump",
    )
    line("they take", bench.size["sampled"] / 1e6, "MB", f"of {bench.size['full'] / 1e6:.1f} MB")


def line(what: str, number: float, unit: str, remark: str = "") -> None:
    print(f"{what:<32}{number:9.1f} {unit:<5}{remark}".rstrip())


if __name__ == "__main__":
    main()
