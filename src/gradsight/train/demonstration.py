"""The demo's training run: the trainer with every instrument on, and one poisoned sample."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gradsight.core import rundir
from gradsight.errors import UsageError
from gradsight.memory.verify import verify_checkpointing
from gradsight.train.batches import Batch
from gradsight.train.config import (
    Callbacks,
    Ghost,
    GradDump,
    ModelShape,
    Settings,
    Trainer,
    Watching,
)
from gradsight.train.loop import train
from gradsight.train.memory import build_for
from gradsight.train.processes import Processes
from gradsight.train.run import instruments, prepare, resolved
from gradsight.train.run_directory import Beginning, run_directory
from gradsight.train.samples import Order
from gradsight.values.memory import CheckpointingReport


@dataclass(frozen=True)
class Demonstration:
    """What is trained, and the fault that is planted."""

    # As many as take under a minute on a busy machine.
    steps: int = 100
    batch_size: int = 16
    block_size: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    rate: float = 2e-3
    target_rows: int = 24
    poisoned_step: int = 70
    poisoned_row: int = 7
    poison: float = 1000.0
    """The weight of the poisoned sample, where all others have 1."""

    def settings(self, run_dir: Path) -> Settings:
        """As `gradsight train` would be told, without the fault."""
        callbacks = Callbacks(
            grad_dump=GradDump(enabled=True, start_step=self.steps - 1, dump_on="warning"),
            ghost=Ghost(refresh_every=5),
            watch=Watching(histogram_interval=20),
        )
        settings = Settings(
            block_size=self.block_size,
            gradient_checkpointing=True,
            model=ModelShape(n_layer=self.layers, n_head=self.heads, n_embd=self.width),
            batch_size=self.batch_size,
            max_steps=self.steps,
            learning_rate=self.rate,
            val_batch_size=self.target_rows,
            dot_prod_save_interval=50,
            eval_samples=self.batch_size,
            log_interval=20,
            log_grad_dist_every=0,
            device="cpu",
            results_dir=str(run_dir.parent),
            experiment=run_dir.name,
            trainer=Trainer(callbacks),
        )
        return resolved(settings)

    def poisoned(self, step: int, batch: Batch) -> Batch:
        """The micro-batch; in one step one of its samples counts more than the others."""
        if step != self.poisoned_step:
            return batch
        weights = torch.ones(len(batch.sample_ids))
        weights[self.poisoned_row] = self.poison
        return replace(batch, weights=weights)

    def poisoned_sample(self, order: Order) -> int:
        """The id of the sample that is poisoned."""
        ids = order.take(self.poisoned_step * self.batch_size, self.batch_size)
        return ids[self.poisoned_row]


@dataclass(frozen=True, slots=True)
class Performance:
    """How a demo's training went."""

    poisoned: int
    """The id of the poisoned sample."""
    ended_by: int | None
    """The signal that ended it early, if one did."""


def measure_memory(planned: Demonstration) -> CheckpointingReport:
    """One training step, plain and with activation checkpointing."""
    build = build_for(planned.settings(Path("demo")))
    return verify_checkpointing(build(planned.batch_size))


def perform_training(
    planned: Demonstration, run_dir: Path, memory: CheckpointingReport
) -> Performance:
    """Train under all instruments; the memory that was measured goes to the record."""
    if rundir.is_run(run_dir):
        raise UsageError(f"{run_dir} holds a run already; give a directory of its own")
    processes = Processes("cpu")
    try:
        run = prepare(planned.settings(run_dir), run_dir, processes, planned.poisoned)
        with run_directory(run_dir, processes, Beginning.ANEW), instruments(run) as tools:
            ended_by = train(run, tools)
            # Only now: `watch` forgets what a run directory holds from its first step on.
            tools.tracker.log_scalars(memory.scalars() | memory.kind_scalars(), step=0)
    finally:
        processes.close()
    return Performance(planned.poisoned_sample(run.batches.order), ended_by)
