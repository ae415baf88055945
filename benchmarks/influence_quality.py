"""What the scores are worth: do they find corrupted samples, know a target's own domain, and save training steps?

A small GPT learns the bytes of Python's standard library. A tenth of the training samples is corrupted (their bytes shuffled).
Every sample's scores are added up over training (its first part left out), weighted by the learning rate. Printed are

    the AUC of finding the corrupted samples by that sum, for Adam-aware and for plain scores
    where the samples of the target's own domain rank among all domains
    how many fewer steps a run without the worst-scored samples needs to the same validation loss
    the honesty of both kinds of scores: the correlation of predicted and measured changes of the target's loss

    python benchmarks/influence_quality.py [--steps 400] [--quick]
"""

import sys

sys.path.append(sys.path.pop(0))  # this folder last: its statistics.py must not hide the standard library's

import argparse
import sysconfig
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradsight import GhostEngine

DOMAINS = ("asyncio", "email", "encodings", "unittest", "idlelib", "xml")
OWN = "email"
LENGTH, BATCH = 128, 16
SETTLED = 0.2
"""The share of training after which scores count: before it, a model learns which bytes are common, from any sample."""


@dataclass(frozen=True)
class Corpus:
    """Byte sequences with their domain, some of them corrupted."""

    ids: Tensor
    domains: list[str]
    corrupted: Tensor

    def pair(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        chosen = self.ids[rows]
        return chosen[:, :-1], chosen[:, 1:]


def read(domain: str) -> bytes:
    folder = Path(sysconfig.get_paths()["stdlib"]) / domain
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*.py")) if "test" not in path.parts)


def corpus(per_domain: int, corrupt: float, seed: int) -> Corpus:
    """Random pieces of every domain; a share of them with their bytes shuffled."""
    generator = torch.Generator().manual_seed(seed)
    ids, domains = [], []
    for domain in DOMAINS:
        data = torch.frombuffer(bytearray(read(domain)), dtype=torch.uint8).long()
        starts = torch.randint(0, len(data) - LENGTH - 1, (per_domain,), generator=generator)
        ids += [data[s : s + LENGTH + 1] for s in starts.tolist()]
        domains += [domain] * per_domain
    table = torch.stack(ids)
    corrupted = torch.rand(len(table), generator=generator) < corrupt
    for row in corrupted.nonzero().flatten().tolist():
        table[row] = table[row][torch.randperm(LENGTH + 1, generator=generator)]
    return Corpus(table, domains, corrupted)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@dataclass
class Outcome:
    """What one training run gave."""

    sums: dict[str, Tensor]
    """By target: every sample's scores, added up."""
    curve: list[tuple[int, float]]
    """Steps and validation loss."""
    correlation: float
    seconds: float


def train(data: Corpus, rows: Tensor, targets: dict[str, tuple[Tensor, Tensor]], steps: int, kind: str | None) -> Outcome:
    """Train on some rows of the corpus; kind "adam", "plain", or None for no scores."""
    torch.manual_seed(0)
    model, started = GPT(), time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.0)
    engine = None
    if kind is not None:
        engine = GhostEngine(
            model, loss_fn, targets=targets, optimizer=optimizer, precondition="adam" if kind == "adam" else None
        )
    sums = {name: torch.zeros(len(data.ids)) for name in targets}
    order, curve, queue = torch.Generator().manual_seed(1), [], rows[:0]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        if len(queue) < BATCH:
            queue = rows[torch.randperm(len(rows), generator=order)]
        chosen, queue = queue[:BATCH], queue[BATCH:]
        if engine is None:
            loss_fn(model, data.pair(chosen)).backward()
        else:
            with engine.observe(sample_ids=chosen.tolist()):
                loss_fn(model, data.pair(chosen)).backward()
            if step >= SETTLED * steps:
                for name, values in engine.scores.by_target.items():
                    sums[name][chosen] += values * optimizer.param_groups[0]["lr"]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            with torch.no_grad():
                curve.append((step + 1, float(loss_fn(model, targets["all"]))))
    correlation = float("nan") if engine is None else engine.honesty()["all"].correlation
    return Outcome(sums, curve, correlation, time.perf_counter() - started)


def auc(scores: Tensor, positive: Tensor) -> float:
    """The chance that a random corrupted sample scores lower than a random clean one."""
    low, high = scores[positive], scores[~positive]
    return float((low[:, None] < high[None, :]).double().mean() + 0.5 * (low[:, None] == high[None, :]).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--per-domain", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="few steps: shows that everything runs")
    options = parser.parse_args()
    steps = 12 if options.quick else options.steps
    data = corpus(40 if options.quick else options.per_domain, 0.1, seed=0)
    held_out = corpus(8, 0.0, seed=1)
    own = torch.tensor([domain == OWN for domain in held_out.domains]).nonzero().flatten()
    targets = {"all": held_out.pair(slice(None)), OWN: held_out.pair(own)}
    everything = torch.arange(len(data.ids))
    print(f"{len(everything)} samples of {LENGTH} bytes, {int(data.corrupted.sum())} corrupted, {steps} steps of {BATCH}")
    runs = {}
    for kind in ("plain", "adam"):
        run = runs[kind] = train(data, everything, targets, steps, kind)
        found = auc(run.sums["all"], data.corrupted)
        print(f"  {kind:5s} scores: AUC {found:.3f}, honesty {run.correlation:+.3f}, {run.seconds:.0f} s", flush=True)
    by_domain: dict[str, list[float]] = defaultdict(list)
    for row in (~data.corrupted).nonzero().flatten().tolist():
        by_domain[data.domains[row]].append(float(runs["adam"].sums[OWN][row]))
    means = {domain: sum(values) / len(values) for domain, values in by_domain.items()}
    ranked = sorted(means, key=lambda domain: -means[domain])
    print(f"  mean score for the target {OWN!r}: " + ", ".join(f"{d} {means[d]:.2e}" for d in ranked))
    print(f"  the target's own domain ranks {ranked.index(OWN) + 1} of {len(ranked)}")
    plain = train(data, everything, targets, steps, None)
    goal = min(loss for _, loss in plain.curve)
    print(f"  validation loss {goal:.3f} after {first_below(plain, goal)} steps with all samples")
    for kind, run in runs.items():
        worst = run.sums["all"].argsort()[: int(0.12 * len(everything))]
        kept = torch.tensor(sorted(set(everything.tolist()) - set(worst.tolist())))
        cleaned = train(data, kept, targets, steps, None)
        print(f"  and after {first_below(cleaned, goal)} steps without the worst 12% by {kind} scores")


def first_below(run: Outcome, goal: float) -> int | None:
    """The first step at which the validation loss is no more than the goal; None: never."""
    return next((step for step, loss in run.curve if loss <= goal), None)


if __name__ == "__main__":
    main()
