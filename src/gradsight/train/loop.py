"""The training loop, with the five instruments where they belong. Made to be read and copied."""

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
from gradsight.errors import RunError
from gradsight.measure.distribution import log_gradient_distribution
from gradsight.memory.monitor import MemoryMonitor
from gradsight.session.watch_session import Watch
from gradsight.session.watching import watch
from gradsight.store.run_files import read_run_config, write_config
from gradsight.store.run_problems import RunProblems
from gradsight.store.tracker import MetricsTracker
from gradsight.train.batches import Batch, BatchStream
from gradsight.train.checkpoint import CheckpointFacts
from gradsight.train.config import Settings, to_dict
from gradsight.train.epochs import epochs_to_log, last_epoch
from gradsight.train.evaluate import NextTokenLoss, evaluate
from gradsight.train.processes import Processes
from gradsight.train.progress import Progress
from gradsight.train.scoring import Scoring
from gradsight.train.stop_request import StopRequest
from gradsight.train.training_log import TrainingLog
from gradsight.train.training_state import Trained, save
from gradsight.values.steps import Schedule

OnBatch = Callable[[int, Batch], Batch]
RECORDER: dict[str, bool | Literal["batch"]] = {"true": True, "false": False, "batch": "batch"}
"""What the flight recorder's setting means to `watch`."""


def unchanged(step: int, batch: Batch) -> Batch:
    """The micro-batch as it is."""
    return batch


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
    batches: BatchStream
    progress: Progress
    on_batch: OnBatch = unchanged
    """Sees, and may change, every micro-batch before it is used."""
    step: int = 0
    """Steps made so far, in all."""
    position: int = 0
    """Samples used so far, in all."""
    seconds: float = 0.0
    """Time spent so far, in all."""
    memory: dict[str, float] = field(default_factory=dict)
    """The last look at it."""
    predicted_bytes: int | None = None
    """The peak that was expected before training; None where nobody asked."""
    problems: RunProblems = field(init=False)
    """Faults that training survives, for the record."""

    def __post_init__(self) -> None:
        self.problems = RunProblems(self.run_dir if self.processes.first else None)

    def evaluate(self) -> dict[str, float | None]:
        """The losses of train, val and test."""
        wanted = self.settings.eval_samples
        return evaluate(self.model, self.loss, self.batches, wanted, self.processes)


def train(run: Training, tools: Instruments) -> int | None:
    """Train up to max_steps. Returns the signal that ended the run early, if one did."""
    settings, model, optimizer = run.settings, run.model, run.optimizer
    watching = settings.trainer.callbacks.watch
    parameters = list(model.parameters())
    log = TrainingLog(run.run_dir, up_to=run.step, problems=run.problems)
    monitor = MemoryMonitor()
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
            # The progress shows the loss, and the findings are printed when the run is over.
            quiet=True,
        ) as watched,
        StopRequest() as request,
        run.progress,
    ):
        if run.processes.first:
            keep_settings(run)
        if run.predicted_bytes is not None:
            gigabytes = run.predicted_bytes / 1e9
            watched.log_scalar("memory/predicted_peak_gb", gigabytes, run.step)
        if run.step % settings.eval_interval == 0:
            log_losses(run, watched, log)
        while run.step < settings.max_steps:
            started, step = time.perf_counter(), run.step
            lr = set_learning_rate(optimizer, settings, step)
            loss = torch.zeros((), device=run.processes.device)
            for micro in range(settings.gradient_accumulation_steps):
                last = micro == settings.gradient_accumulation_steps - 1
                batch = run.on_batch(step, run.batches.get(run.position, micro))
                watched.ids(batch.sample_ids)
                with reduced_at_last(model, last), tools.scoring.observe(batch, step) as rows:
                    part = run.loss(model, rows) / settings.gradient_accumulation_steps
                    part.backward()  # type: ignore[no-untyped-call]
                loss += part.detach()
            for epoch in epochs_here(run):  # as step, so that epochs are what the plots count
                log_gradient_distribution(model, tools.tracker, epoch, log_histogram=True)
            # Whoever wants the true gradient has looked by now: where one entry is NaN, clipping
            # makes every gradient NaN; where one is infinite, it makes zeros of the others.
            norm = torch.nn.utils.clip_grad_norm_(parameters, settings.grad_clip or math.inf)
            optimizer.step()
            optimizer.zero_grad()
            loss = run.processes.mean(loss)
            watched.log(loss=loss, lr=lr)
            run.step = step + 1
            if run.processes.first and due(run.step, settings.log_interval, settings.max_steps):
                run.memory = monitor.sample(watched, step)
            run.position += run.batches.per_step
            run.seconds += time.perf_counter() - started
            show_progress(run, loss, norm, log)
            if due(run.step, settings.eval_interval, settings.max_steps):
                log_losses(run, watched, log)
            # A signal may reach one process a step early: ending alone, it would be waited for.
            ending = run.processes.any(request.signal is not None)
            if ending or due(run.step, settings.checkpoint_interval, settings.max_steps):
                log.write()
                save_progress(run, tools.scoring)
            if ending and run.step < settings.max_steps:
                return request.signal or signal.SIGTERM
    return None


def set_learning_rate(optimizer: Optimizer, settings: Settings, step: int) -> float:
    """Give the optimizer the learning rate of a step."""
    lr = learning_rate(
        step,
        highest=settings.learning_rate,
        warmup=settings.warmup_steps,
        total=settings.max_steps,
        lowest=settings.learning_rate * settings.optimizer.min_lr_ratio,
    )
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def learning_rate(step: int, *, highest: float, warmup: int, total: int, lowest: float) -> float:
    """A line up over `warmup` steps, then half a cosine down to the last of `total` steps.

    >>> rates = [learning_rate(n, highest=1.0, warmup=2, total=5, lowest=0.0) for n in range(5)]
    >>> [round(rate, 2) for rate in rates]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, total - 1 - warmup)
    return lowest + (highest - lowest) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def due(step: int, interval: int, last: int) -> bool:
    """Whether something is to be done after this many steps: every `interval`, and at the end."""
    return step == last or (interval > 0 and step % interval == 0)


def epochs_here(run: Training) -> list[int]:
    """The epochs under which this step's gradients are logged.

    Every so many epochs, at their first step; and at the very end.
    """
    every = run.settings.log_grad_dist_every
    length = run.batches.order.epoch_length
    end = run.position + run.batches.per_step
    epochs = epochs_to_log(run.position, end, length, every)
    if every and run.step == run.settings.max_steps - 1:
        epochs = sorted({*epochs, last_epoch(run.position, end, length)})
    return epochs


def show_progress(run: Training, loss: Tensor, norm: Tensor, log: TrainingLog) -> None:
    """Show and log a step's numbers; they are read from the device only when they are due."""
    run.progress.advance()
    if not due(run.step, run.settings.log_interval, run.settings.max_steps):
        return
    grad_norm = whole(norm).item()
    run.progress.numbers(loss.item(), grad_norm, run.memory)
    if run.processes.first:
        lr = run.optimizer.param_groups[0]["lr"]
        log.add({"step": run.step, "loss": loss.item(), "lr": lr, "grad_norm": grad_norm})


def log_losses(run: Training, watched: Watch, log: TrainingLog) -> None:
    """Evaluate, and keep the losses in training_log.json and in the record."""
    started = time.perf_counter()
    losses = run.evaluate()
    known = {name: value for name, value in losses.items() if value is not None}
    if run.processes.first:
        epoch = round(run.position / run.batches.order.epoch_length, 4)
        seconds = round(run.seconds, 3)
        log.add({"step": run.step, "epoch": epoch, **losses, "seconds": seconds})
        log.write()
        for name, value in known.items():
            watched.log_scalar(f"eval/{name}", value, run.step)
    shown = "  ".join(f"{name.removesuffix('_loss')} {value:.3f}" for name, value in known.items())
    run.progress.say(f"step {run.step}/{run.settings.max_steps}  losses: {shown}")
    run.progress.pause(time.perf_counter() - started)


def save_progress(run: Training, scoring: Scoring) -> None:
    """Write the scores so far and a checkpoint, from which --resume goes on."""
    started = time.perf_counter()
    scoring.save(run.step)
    facts = CheckpointFacts(
        step=run.step,
        position=run.position,
        seconds=run.seconds,
        data=run.batches.samples.fingerprint,
        processes=run.processes.world,
    )
    trained = Trained(run.model, run.optimizer)
    fault = save(run.run_dir, trained, run.processes, facts, run.settings.keep_checkpoints)
    if fault is not None:
        run.problems.report("checkpoint", fault, run.step)
    run.progress.pause(time.perf_counter() - started)


def keep_settings(run: Training) -> None:
    """Add to config.json what `--config` needs to repeat the run; training survives a failure."""
    samples = run.batches.samples
    data = {
        "fingerprint": samples.fingerprint,
        "samples": len(samples),
        "domains": list(samples.corpus.domains),
    }
    try:
        config = read_run_config(run.run_dir)
        settings = {**config.get("settings", {}), "train": to_dict(run.settings)}
        write_config(run.run_dir, {**config, "settings": settings, "data": data})
    except (OSError, RunError) as error:
        text = f"{rundir.CONFIG} does not hold the trainer's settings: {error}. Training goes on"
        run.problems.report("config", text, run.step)
