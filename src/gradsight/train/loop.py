"""The training loop, with the five instruments where they belong. Made to be read and copied."""

import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.core import rundir
from gradsight.core.shards import whole
from gradsight.core.sharing import reduced_at_last
from gradsight.dump.dumper import GradientDumper
from gradsight.measure.distribution import log_gradient_distribution
from gradsight.memory.monitor import MemoryMonitor
from gradsight.session.watch_session import Watch, watch
from gradsight.store.run_problems import RunProblems
from gradsight.store.store import write_config
from gradsight.store.tracker import MetricsTracker
from gradsight.train import checkpoint
from gradsight.train.batches import Batch, Batches
from gradsight.train.config import Settings, to_dict
from gradsight.train.evaluate import NextTokenLoss, TrainingLog, evaluate
from gradsight.train.processes import Processes
from gradsight.train.progress import Telling
from gradsight.train.schedule import learning_rate
from gradsight.train.scoring import Scoring
from gradsight.train.stopping import Stopping
from gradsight.values.steps import Schedule

OnBatch = Callable[[int, Batch], Batch]
RECORDER: dict[str, bool | Literal["batch"]] = {"true": True, "false": False, "batch": "batch"}
"""What the flight recorder's setting means to `watch`."""


@dataclass(frozen=True)
class Instruments:
    """What looks at training beside `watch`."""

    scoring: Scoring
    dumper: GradientDumper | None
    tracker: MetricsTracker


@dataclass
class Training:
    """Everything that a run is made of."""

    settings: Settings
    run_dir: Path
    processes: Processes
    model: nn.Module
    optimizer: Optimizer
    loss: NextTokenLoss
    batches: Batches
    telling: Telling
    on_batch: OnBatch | None = None
    """Sees, and may change, every micro-batch before it is used."""
    step: int = 0
    """Steps made so far, in all."""
    position: int = 0
    """Samples used so far, in all."""
    seconds: float = 0.0
    """Time spent so far, in all."""
    memory: dict[str, float] = field(default_factory=dict)
    """The last look at it."""
    problems: RunProblems = field(init=False)
    """Faults that training survives, for the record."""

    def __post_init__(self) -> None:
        self.problems = RunProblems(self.run_dir if self.processes.first else None)

    def evaluate(self) -> dict[str, float | None]:
        """The losses of train, val and test."""
        samples, vocabulary = self.batches.samples, self.batches.vocabulary
        wanted, size = self.settings.eval_samples, self.settings.batch_size
        return evaluate(self.model, self.loss, samples, wanted, size, vocabulary, self.processes)


def train(run: Training, tools: Instruments) -> int | None:
    """Train up to max_steps. Returns the signal that ended the run early, if one did."""
    settings, model, optimizer = run.settings, run.model, run.optimizer
    watching = settings.trainer.callbacks.watch
    parameters = list(model.parameters())
    log = TrainingLog(run.run_dir, up_to=run.step, problems=run.problems)
    monitor = MemoryMonitor(log_every=settings.log_interval)
    model.train()
    with (
        watch(
            model,
            optimizer,
            run_dir=run.run_dir,
            sinks=watching.sinks,
            histograms=Schedule(step_interval=watching.histogram_interval),
            health=watching.health,
            dump=tools.dumper,
            recorder=RECORDER[watching.recorder],
            start_step=run.step,
        ) as watched,
        Stopping() as stopping,
        run.telling,
    ):
        if run.processes.first:
            add_to_config(run)
        if run.step % settings.eval_interval == 0:
            look(run, watched, log)
        while run.step < settings.max_steps:
            started, step = time.perf_counter(), run.step
            lr = set_learning_rate(optimizer, settings, step)
            loss = torch.zeros((), device=run.processes.device)
            for micro in range(settings.gradient_accumulation_steps):
                last = micro == settings.gradient_accumulation_steps - 1
                batch = run.batches.get(run.position, micro)
                batch = batch if run.on_batch is None else run.on_batch(step, batch)
                watched.ids(batch.sample_ids)
                with reduced_at_last(model, last), tools.scoring.observe(batch, step):
                    part = run.loss(model, batch.pair) / settings.gradient_accumulation_steps
                    part.backward()  # type: ignore[no-untyped-call]
                loss += part.detach()
            if (
                epoch := epoch_to_log(run)
            ) is not None:  # as step, so that epochs are what the plots count
                log_gradient_distribution(model, tools.tracker, epoch, log_histogram=True)
            norm = torch.nn.utils.clip_grad_norm_(parameters, settings.grad_clip or math.inf)
            optimizer.step()
            optimizer.zero_grad()
            loss = run.processes.mean(loss)
            watched.log(loss=loss, lr=lr)
            if run.processes.first:
                run.memory = monitor.sample(watched, step) or run.memory
            run.step, run.position = step + 1, run.position + run.batches.per_step
            run.seconds += time.perf_counter() - started
            tell(run, loss, norm)
            if due(run.step, settings.eval_interval, settings.max_steps):
                look(run, watched, log)
            ending = run.processes.any(stopping.signal is not None)
            if ending or due(run.step, settings.checkpoint_interval, settings.max_steps):
                save(run, tools.scoring)
            if ending and run.step < settings.max_steps:
                return stopping.signal or signal.SIGTERM
    return None


def set_learning_rate(optimizer: Optimizer, settings: Settings, step: int) -> float:
    """Give the optimizer the learning rate of a step."""
    lowest = settings.learning_rate * settings.optimizer.min_lr_ratio
    total, warmup = settings.max_steps, settings.warmup_steps
    lr = learning_rate(
        step, highest=settings.learning_rate, warmup=warmup, total=total, lowest=lowest
    )
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def due(step: int, interval: int, last: int) -> bool:
    """Whether something is to be done after this many steps: every `interval`, and at the end."""
    return step == last or (interval > 0 and step % interval == 0)


def epoch_to_log(run: Training) -> int | None:
    """The epoch under which this step's gradients are logged: every so many epochs at their first
    step, and at the very end.
    """
    every, length = run.settings.log_grad_dist_every, run.batches.order.epoch_length
    end = run.position + run.batches.per_step
    if every and run.step == run.settings.max_steps - 1:
        return -(-end // length)
    begins = -(-run.position // length)
    return begins if every and begins % every == 0 and begins * length < end else None


def tell(run: Training, loss: Tensor, norm: Tensor) -> None:
    """Show progress; the numbers are read from the device only when they are due."""
    run.telling.advance()
    if due(run.step, run.settings.log_interval, run.settings.max_steps):
        run.telling.numbers(loss.item(), whole(norm).item(), run.memory)


def look(run: Training, watched: Watch, log: TrainingLog) -> None:
    """Evaluate, and keep the losses in training_log.json and in the record."""
    started = time.perf_counter()
    losses = run.evaluate()
    if run.processes.first:
        epoch = run.position / run.batches.order.epoch_length
        log.add(
            {"step": run.step, "epoch": round(epoch, 4), **losses, "seconds": round(run.seconds, 3)}
        )
        for name, value in losses.items():
            if value is not None:
                watched.log_scalar(f"eval/{name}", value, run.step)
    shown = "  ".join(
        f"{name.removesuffix('_loss')} {value:.3f}"
        for name, value in losses.items()
        if value is not None
    )
    run.telling.say(f"step {run.step}/{run.settings.max_steps}  losses: {shown}")
    run.telling.pause(time.perf_counter() - started)


def save(run: Training, scoring: Scoring) -> None:
    """Write the scores so far and a checkpoint, from which --resume goes on."""
    started = time.perf_counter()
    scoring.save(run.step)
    facts = {
        "step": run.step,
        "position": run.position,
        "seconds": run.seconds,
        "data": run.batches.samples.fingerprint,
    }
    fault = checkpoint.save(
        run.run_dir, run.model, run.optimizer, run.processes, facts, run.settings.keep_checkpoints
    )
    if fault is not None:
        run.problems.report("checkpoint", fault, run.step)
    run.telling.pause(time.perf_counter() - started)


def add_to_config(run: Training) -> None:
    """Add to config.json what `--config` needs to repeat the run."""
    config = json.loads((run.run_dir / rundir.CONFIG).read_text())
    samples = run.batches.samples
    config["settings"]["train"] = to_dict(run.settings)
    config["data"] = {
        "fingerprint": samples.fingerprint,
        "samples": len(samples),
        "domains": list(samples.corpus.domains),
    }
    write_config(run.run_dir, config)
