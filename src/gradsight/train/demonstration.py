"""The demo's training run: a small GPT under all five instruments, with one poisoned sample on the
way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradsight.dump.dumper import GradientDumper
from gradsight.ghost.engine import GhostEngine
from gradsight.memory.apply import apply_checkpointing
from gradsight.memory.monitor import MemoryMonitor
from gradsight.memory.verify import verify_checkpointing
from gradsight.session.watch_session import Watch, watch
from gradsight.store.reader import open_run
from gradsight.store.store import write_config
from gradsight.train.batches import spread_evenly
from gradsight.train.data import open_corpus
from gradsight.train.gpt import GPT, GPTConfig
from gradsight.train.samples import Order, Samples
from gradsight.train.schedule import learning_rate
from gradsight.values.memory import CheckpointingReport
from gradsight.values.steps import Schedule

Weighted = tuple[Tensor, Tensor]
"""Tokens, and how much each sample counts."""


@dataclass(frozen=True)
class Demonstration:
    """What is trained, and the fault that is planted."""

    steps: int = 100
    batch_size: int = 16
    block_size: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    rate: float = 2e-3
    target_rows: int = 24
    poisoned_step: int = 70
    poisoned_row: int = 5
    poison: float = 1000.0
    """The weight of the poisoned sample, where all others have 1."""

    def model(self) -> GPT:
        """Always the same one."""
        torch.manual_seed(0)
        return GPT(
            GPTConfig(
                block_size=self.block_size, width=self.width, heads=self.heads, layers=self.layers
            )
        )

    def settings(self) -> dict[str, Any]:
        """As `gradsight train` would be told, without the fault."""
        shape = {"n_layer": self.layers, "n_head": self.heads, "n_embd": self.width}
        sizes = {
            "block_size": self.block_size,
            "batch_size": self.batch_size,
            "max_steps": self.steps,
        }
        return {
            "architecture": "char",
            "model": shape,
            "learning_rate": self.rate,
            "gradient_checkpointing": True,
            **sizes,
        }


def loss_of(model: nn.Module, batch: Weighted) -> Tensor:
    """The mean over samples of each one's mean loss, times its weight."""
    tokens, weights = batch
    logits = model(tokens[:, :-1])
    each = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)
    return (each * weights).mean()


def measure_memory(demo: Demonstration) -> CheckpointingReport:
    """One training step, plain and with activation checkpointing."""
    tokens = torch.randint(
        0, 256, (demo.batch_size, demo.block_size + 1), generator=torch.Generator().manual_seed(0)
    )
    return verify_checkpointing(
        lambda: (demo.model(), (tokens, torch.ones(demo.batch_size)), loss_of)
    )


def run(
    demo: Demonstration,
    run_dir: Path,
    memory: CheckpointingReport,
    tell: Callable[[int, float], None],
) -> int:
    """Train under all instruments; tell(step, loss) after every step. Returns the id of the
    poisoned sample.
    """
    samples = Samples(open_corpus(None), demo.block_size)
    order, poisoned = Order(np.ones(len(samples)), seed=0), -1
    model = demo.model()
    apply_checkpointing(model, "full")
    optimizer = torch.optim.AdamW(model.parameters(), lr=demo.rate)
    target = weighted(samples.of("val"), spread_evenly(len(samples.of("val")), demo.target_rows))
    dumper = GradientDumper(run_dir, start_step=demo.steps - 1, dump_on="warning")
    engine = GhostEngine(
        model,
        loss_of,
        target,
        optimizer=optimizer,
        refresh_every=5,
        run_dir=run_dir,
        save_interval=50,
    )
    monitor = MemoryMonitor(log_every=20)
    with watch(
        model, optimizer, run_dir=run_dir, histograms=Schedule(step_interval=20), dump=dumper
    ) as watched:
        describe(run_dir, demo, watched, memory)
        for step in range(demo.steps):
            ids = order.take(step * demo.batch_size, demo.batch_size)
            tokens, weights = weighted(samples, ids)
            if step == demo.poisoned_step:
                poisoned = ids[demo.poisoned_row]
                weights[demo.poisoned_row] = demo.poison
            watched.ids(ids)
            with engine.observe(
                sample_ids=ids, domains=[samples.domain(each) for each in ids], step=step
            ):
                loss = loss_of(model, (tokens, weights))
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.param_groups[0]["lr"] = learning_rate(
                step, highest=demo.rate, warmup=20, total=demo.steps, lowest=demo.rate / 10
            )
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            watched.log(loss=loss)
            monitor.sample(watched, step)
            tell(step, loss.item())
    engine.close()
    dumper.close()
    return poisoned


def weighted(samples: Samples, ids: list[int]) -> Weighted:
    """The named samples, each counting once."""
    return torch.from_numpy(np.stack([samples.tokens(each) for each in ids])), torch.ones(len(ids))


def describe(
    run_dir: Path, demo: Demonstration, watched: Watch, memory: CheckpointingReport
) -> None:
    """Keep with the run what it read and what was measured before it, for the commands that look at
    it later.
    """
    config = open_run(run_dir).config
    config["settings"]["train"] = demo.settings()
    write_config(run_dir, config)
    for name, value in memory.scalars().items():
        watched.log_scalar(name, value, 0)
