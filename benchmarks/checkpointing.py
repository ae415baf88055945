"""What activation checkpointing saves and costs: measured, predicted, planned, and against
torch.compile's own budget.

    python benchmarks/checkpointing.py                    all tables
    python benchmarks/checkpointing.py --depths 4 --rounds 3 --no-compile --no-large-models

Peaks are exact counts of live tensor bytes; those of compiled code are the allocator's, because
compiled kernels allocate past the dispatcher. Times are of forward and backward, the best of
several rounds in which all candidates take turns.
"""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cyclopts
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from gradsight import (
    apply_checkpointing,
    measure_peak_memory,
    plan_checkpointing,
    predict_peak_memory,
)
from gradsight.memory.workload import Workload, backward, call_build
from gradsight.train.models import training_step

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from memory.allocator import allocator_peak

WIDTH, HEADS, VOCABULARY = 256, 4, 1024


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small language model."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def step_of(depth: int) -> Callable[[], Any]:
    """A build function; the weights are the same each time."""

    def build() -> Any:
        torch.manual_seed(0)
        return GPT(depth), torch.randint(0, VOCABULARY, (4, 256)), loss_fn

    return build


@dataclass
class Candidate:
    """One way of running the step."""

    name: str
    run: Callable[[], Any]
    predicted: int | None
    measured: int
    extra_flops: float | None
    seconds: float = float("inf")


def candidates(depth: int, compiled: bool) -> list[Candidate]:
    """None, full, selective, plans for three budgets, and torch.compile with two of its budgets."""
    build = step_of(depth)
    plain = predict_peak_memory(build, optimizer=None)
    full = predict_peak_memory(build, optimizer=None, policy="full")
    policies: list[tuple[str, Any]] = [(name, name) for name in ("none", "full", "selective")]
    for share in (0.75, 0.5, 0.25):
        budget = int(full.peak_bytes + share * (plain.peak_bytes - full.peak_bytes))
        policies.append(
            (f"plan {budget / 1e6:.0f} MB", plan_checkpointing(build, budget, optimizer=None))
        )
    found = [eager(name, build, policy, plain.flops) for name, policy in policies]
    if compiled:
        found += [compiled_with(build, budget) for budget in (1.0, 0.5)]
    return found


def eager(name: str, build: Callable[[], Any], policy: Any, plain_flops: int) -> Candidate:
    """The step under a policy."""
    workload = call_build(build)
    apply_checkpointing(workload.model, policy)
    use = predict_peak_memory(build, optimizer=None, policy=policy)
    run = step(workload)
    gc.collect()
    measured = measure_peak_memory(run)
    return Candidate(
        name, run, use.peak_bytes, measured.peak_bytes, measured.flops / plain_flops - 1
    )


def compiled_with(build: Callable[[], Any], budget: float) -> Candidate:
    """The step under torch.compile with its activation memory budget: 1 keeps all that it would
    keep by itself.
    """
    torch._dynamo.reset()
    workload = call_build(build)
    workload.model.compile()
    run = step(workload)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        run()
    held = sum(p.numel() * p.element_size() for p in workload.model.parameters())
    held += workload.batch.numel() * workload.batch.element_size()
    return Candidate(
        f"compile, budget {budget:g}", run, None, held + allocator_peak(run).everything, None
    )


def step(workload: Workload) -> Callable[[], None]:
    """Forward and backward, leaving no gradients."""

    def run() -> None:
        backward(workload)
        workload.model.zero_grad(set_to_none=True)

    return run


def race(found: list[Candidate], rounds: int) -> None:
    """Let all take turns and keep each one's best time."""
    for _ in range(rounds):
        for candidate in found:
            start = time.perf_counter()
            candidate.run()
            candidate.seconds = min(candidate.seconds, time.perf_counter() - start)


def show(console: Console, depth: int, found: list[Candidate]) -> None:
    """One table for one depth."""
    table = Table(
        title=f"GPT of {depth} blocks, width {WIDTH}, batch 4 x 256",
        box=None,
        title_justify="left",
        pad_edge=False,
    )
    for name in (
        "",
        "predicted",
        "measured",
        "error",
        "saved",
        "time",
        "extra time",
        "extra FLOPs",
    ):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    base = found[0]
    for one in found:
        error = "" if one.predicted is None else f"{one.predicted / one.measured - 1:+.3%}"
        table.add_row(
            one.name,
            "" if one.predicted is None else f"{one.predicted / 1e6:.1f} MB",
            f"{one.measured / 1e6:.1f} MB",
            error,
            f"{1 - one.measured / base.measured:.1%}",
            f"{one.seconds * 1000:.0f} ms",
            f"{one.seconds / base.seconds - 1:+.1%}",
            "" if one.extra_flops is None else f"{one.extra_flops:+.1%}",
        )
    console.print(table)
    console.print()


def large(console: Console, rounds: int) -> None:
    """How long predictions of GPT-2 take, and what they say."""
    table = Table(
        title="Predicted, batch 4 x 1024, AdamW", box=None, title_justify="left", pad_edge=False
    )
    for name in ("", "plain", "full", "saved", "ceiling", "seconds each"):
        table.add_column(name, justify="right" if name else "left")
    for name in ("GPT2-Small", "GPT2-Medium", "GPT2-Large"):
        best, peaks, share = float("inf"), [], 0.0
        for _ in range(rounds):
            peaks = []
            for policy in (None, "full"):
                start = time.perf_counter()
                use = predict_peak_memory(
                    training_step(name, batch_size=4, block_size=1024), policy=policy
                )
                best = min(best, time.perf_counter() - start)
                share = share or use.activation_share
                peaks.append(use.peak_bytes)
        saved = f"{1 - peaks[1] / peaks[0]:.1%}"
        table.add_row(
            name,
            f"{peaks[0] / 1e9:.2f} GB",
            f"{peaks[1] / 1e9:.2f} GB",
            saved,
            f"{share:.1%}",
            f"{best:.1f}",
        )
    console.print(table)


def main(
    depths: str = "4,8,16", rounds: int = 5, *, compile: bool = True, large_models: bool = True
) -> None:
    """Print the tables."""
    console = Console(width=110)
    for depth in (int(text) for text in depths.split(",")):
        found = candidates(depth, compile)
        race(found, rounds)
        show(console, depth, found)
    if large_models:
        large(console, max(1, rounds // 2))


if __name__ == "__main__":
    cyclopts.run(main)
