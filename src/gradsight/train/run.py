"""A run from its settings: what is put together before the loop, and what is written after it."""

import shlex
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from gradsight.core import rundir
from gradsight.core.problems import say
from gradsight.core.sharing import share_model
from gradsight.dump.dumper import GradientDumper
from gradsight.dump.reader import dumps_in
from gradsight.errors import GradsightError, UsageError
from gradsight.ghost.engine import GhostEngine
from gradsight.ghost.pass_choice import is_bargain
from gradsight.memory.apply import apply_checkpointing
from gradsight.show.run_report import write_reports
from gradsight.show.summary import summarize
from gradsight.show.terminal import health_lines
from gradsight.show.text import wants_colour
from gradsight.store.reader import open_run
from gradsight.store.tracker import MetricsTracker
from gradsight.train.batches import BatchStream
from gradsight.train.checkpoint import CheckpointFacts, checkpoint_names
from gradsight.train.config import Settings, to_dict
from gradsight.train.data import open_corpus
from gradsight.train.epochs import with_steps
from gradsight.train.evaluate import NextTokenLoss
from gradsight.train.loop import Instruments, OnBatch, Training, train, unchanged
from gradsight.train.memory import (
    advice,
    expected_memory,
    is_out_of_memory,
    refuse_what_cannot_fit,
)
from gradsight.train.models import architecture, model_from_settings
from gradsight.train.processes import Processes
from gradsight.train.progress import PEAKS, Progress
from gradsight.train.run_directory import Beginning, how_to_begin, run_directory
from gradsight.train.sample_texts import SampleTexts
from gradsight.train.samples import Order, Samples, read_weights
from gradsight.train.scoring import Scoring
from gradsight.train.training_state import Trained, load_newest


def run_training(
    settings: Settings,
    *,
    resume: bool = False,
    overwrite: bool = False,
    eval_only: bool = False,
    on_batch: OnBatch = unchanged,
) -> int:
    """Train, or evaluate, as the settings say; returns the exit code."""
    settings = resolved(settings)
    run_dir = Path(settings.results_dir) / settings.name
    processes = Processes(settings.device)
    try:
        if not eval_only:
            beginning = how_to_begin(run_dir, resume, overwrite)
            refuse_what_cannot_fit(settings, processes.device, run_dir / rundir.CONFIG)
        run = prepare(settings, run_dir, processes, on_batch)
        if eval_only:
            return evaluate_only(run)
        with run_directory(run_dir, processes, beginning):
            return begin_and_train(run, beginning)
    except KeyboardInterrupt:
        if processes.first:
            print("Stopped at once, without saving", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        if is_out_of_memory(error):
            config = run_dir / rundir.CONFIG
            raise GradsightError(advice(settings, processes.device, config)) from error
        raise
    finally:
        processes.close()


def begin_and_train(run: Training, beginning: Beginning) -> int:
    """Take up what there is to go on from, train, and report; returns the exit code."""
    if beginning is Beginning.AGAIN:
        run.progress.say(f"{run.run_dir} has no checkpoint yet: training starts from the beginning")
    if beginning is Beginning.FROM_CHECKPOINT:
        resume_from_checkpoint(run)
    wanted = run.settings.max_steps
    if run.step >= wanted:
        run.progress.say(
            f"Nothing to do: {run.step} of {wanted} steps are made. "
            f"Give a larger --max_steps or --epochs"
        )
        return 0
    introduce(run)
    with instruments(run) as tools:
        ended_by = train(run, tools)
    return finish(run, ended_by)


def resolved(settings: Settings) -> Settings:
    """The settings with what follows from others filled in, so that config.json says all."""
    return replace(
        settings,
        data=_absolute(settings.data),
        data_weights=_absolute(settings.data_weights),
        tokenizer=_absolute(settings.tokenizer),
        block_size=settings.block_size or architecture(settings.architecture).block_size,
        experiment=settings.name,
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def prepare(
    settings: Settings, run_dir: Path, processes: Processes, on_batch: OnBatch = unchanged
) -> Training:
    """Everything that the loop needs, from settings that are resolved."""
    assert settings.block_size is not None
    samples = Samples(open_corpus(settings.data), settings.block_size)
    model, optimizer = build(settings, processes)
    batches = BatchStream(
        samples=samples,
        order=order_of(settings, samples),
        batch_size=settings.batch_size,
        accumulation=settings.gradient_accumulation_steps,
        rank=processes.rank,
        world=processes.world,
        vocabulary=settings.model.vocab_size or architecture(settings.architecture).vocabulary,
        device=processes.device,
    )
    tokens_per_step = batches.per_step * settings.block_size
    settings = with_steps(settings, batches.order.epoch_length, batches.per_step)
    return Training(
        settings=settings,
        run_dir=run_dir,
        processes=processes,
        model=model,
        optimizer=optimizer,
        loss=NextTokenLoss(settings.train_dtype, processes.device),
        batches=batches,
        progress=Progress(settings.max_steps, tokens_per_step, speaks=processes.first),
        on_batch=on_batch,
    )


def order_of(settings: Settings, samples: Samples) -> Order:
    """The order in which the run trains on its samples."""
    weights = np.ones(len(samples))
    if settings.data_weights is not None:
        weights = read_weights(settings.data_weights, samples)
    return Order(weights, settings.seed)


def build(settings: Settings, processes: Processes) -> tuple[nn.Module, Optimizer]:
    """The model as the processes share it, and its optimizer."""
    torch.manual_seed(settings.seed)  # the same weights on every process, however many there are
    model = model_from_settings(to_dict(settings)).to(processes.device)
    blocks = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ == "GPT2Block"
    }
    if settings.gradient_checkpointing:
        apply_checkpointing(model, "full", blocks=list(blocks))
    model = share_model(model, settings.parallel, list(blocks.values()), processes.device)
    torch.manual_seed(settings.seed + 1 + processes.rank)  # dropout differs from process to process
    return model, build_optimizer(model, settings)


def build_optimizer(model: nn.Module, settings: Settings) -> Optimizer:
    """AdamW; biases and norms, which have one dimension, do not decay."""
    adam = settings.optimizer
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": adam.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (adam.beta1, adam.beta2)
    return AdamW(groups, lr=settings.learning_rate, betas=betas, eps=adam.eps)


def introduce(run: Training) -> None:
    """Say what is going to be trained on what, and what memory it will take."""
    settings = run.settings
    if run.processes.first:
        data = settings.data or "the source of Python's standard library"
        run.progress.say(
            f"Data: {data}: {run.batches.order.epoch_length:,} samples of {settings.block_size} "
            f"tokens, {len(run.batches.samples.corpus.domains)} domains"
        )
        if settings.startup_report:
            with run.progress.working("Predicting memory"):
                samples = run.batches.order.epoch_length
                expected = expected_memory(settings, run.processes.device, samples)
            run.predicted_bytes = expected.peak_bytes
            for line in expected.lines:
                run.progress.say(line)
        per_step = run.batches.per_step
        epochs = settings.max_steps * per_step / run.batches.order.epoch_length
        steps = f"{settings.max_steps:,} steps of {per_step} samples ({epochs:,.2f} epochs)"
        run.progress.say(
            f"Training: {settings.architecture}, {settings.method}, {steps}, into {run.run_dir}"
        )
    run.processes.wait()


@contextmanager
def instruments(run: Training) -> Iterator[Instruments]:
    """The instruments that the settings ask for; closed, they have written everything."""
    processes = run.processes
    dump = run.settings.trainer.callbacks.grad_dump
    dumper = None
    if dump.enabled or dump.dump_on:
        dumper = GradientDumper(run.run_dir, **asdict(dump))
    engine = None
    if run.settings.method == "GradDotProd":
        engine = make_engine(run)
    scoring = Scoring(engine, run.problems)
    # What is counted in epochs is shown wherever the watch shows its steps.
    sinks = run.settings.trainer.callbacks.watch.sinks if processes.first else ()
    tracker = MetricsTracker(
        run.run_dir if processes.first else None,
        use_wandb="wandb" in sinks,
        use_tensorboard="tensorboard" in sinks,
    )
    went_well = False
    try:
        yield Instruments(scoring, dumper, tracker)
        went_well = True
    finally:
        tracker.close()
        # After a failure the other processes would be waited for in vain.
        if went_well or processes.world == 1:
            scoring.close()
            if dumper is not None:
                dumper.close()


def make_engine(run: Training) -> GhostEngine:
    """The engine that scores training samples against the validation batch."""
    settings = run.settings
    options = asdict(settings.trainer.callbacks.ghost)
    save_format = options.pop("format")
    mode = scoring_mode(settings)
    return GhostEngine(
        run.model,
        run.loss,
        run.batches.validation(settings.val_batch_size, shared_out=mode == "two_pass"),
        optimizer=run.optimizer,
        run_dir=run.run_dir,
        mode=mode,
        save_interval=settings.dot_prod_save_interval,
        save_format=save_format,
        **options,
    )


def scoring_mode(settings: Settings) -> str:
    """One pass or two, decided before the first step: a run that is resumed goes the same way."""
    ghost = settings.trainer.callbacks.ghost
    if settings.ghost_mode != "auto":
        return settings.ghost_mode
    micro_batches = settings.gradient_accumulation_steps
    cheap = is_bargain(settings.batch_size, settings.val_batch_size, micro_batches)
    asked = ghost.exact_grad or ghost.refresh_every > 1 or settings.data_weights is not None
    scaled = settings.parallel == "fsdp" and ghost.precondition is not None
    return "auto" if cheap and not asked and not scaled else "two_pass"


def resume_from_checkpoint(run: Training) -> None:
    """Take up the newest checkpoint that is intact."""
    facts = load_from(run, run.optimizer)
    if facts.data != run.batches.samples.fingerprint:
        raise UsageError(
            f"--resume: {run.run_dir} was trained on other data: "
            f"the order of samples would not be the same"
        )
    run.step = facts.step
    run.position = facts.position
    run.seconds = facts.seconds
    run.progress.start_at(run.step)
    run.progress.say(f"Resuming after step {run.step}")


def load_from(run: Training, optimizer: Optimizer | None) -> CheckpointFacts:
    """Load the newest checkpoint that is intact, and say which ones are not."""
    trained = Trained(run.model, optimizer)
    facts, passed_over = load_newest(run.run_dir, trained, run.processes)
    folder = rundir.checkpoint_folder(facts.step)
    for damage in passed_over:
        if run.processes.first:
            say(f"{damage.what}. Going back to the one of {folder}")
    return facts


def evaluate_only(run: Training) -> int:
    """Print the losses of the newest checkpoint, or of the initial weights."""
    if not checkpoint_names(run.run_dir):
        run.progress.say(f"Evaluating the initial weights: {run.run_dir} has no checkpoint")
    else:
        facts = load_from(run, None)
        folder = run.run_dir / rundir.CHECKPOINTS / rundir.checkpoint_folder(facts.step)
        run.progress.say(f"Evaluating {folder}: the weights after {facts.step} steps")
    for name, value in run.evaluate().items():
        run.progress.say(f"  {name:<10} {'-' if value is None else format(value, '.4f')}")
    return 0


def finish(run: Training, ended_by: int | None) -> int:
    """Write the report, say how it went and where everything is; gives the exit code."""
    if run.processes.first:
        for name, value in run.memory.items():
            if name in PEAKS:
                run.progress.say(f"{name}: {value:.3f}")
        run.progress.say(f"{run.step} steps in {run.seconds:.0f} s")
        try:
            lines = report_on(run)
        except (GradsightError, OSError, sqlite3.Error) as error:
            # The weights are trained: a record that is not whole, or a full disk, is no failure.
            lines = [f"There is no report: {error}"]
        if ended_by is not None:
            say_how_to_continue(run, ended_by)
        for line in lines:
            run.progress.show(line)
    return 0 if ended_by is None else 128 + ended_by


def report_on(run: Training) -> list[str]:
    """Write the report; gives the verdict, and where the report is."""
    recorded = open_run(run.run_dir)
    summary = summarize(recorded, dumps_in(run.run_dir))
    lines = [summary.verdict]
    if summary.health.findings:
        lines = health_lines(summary.health, wants_colour(sys.stdout))
    try:
        # Its own data, of which nobody else has told it.
        texts = SampleTexts(run.run_dir, run.settings.data, run.settings.tokenizer)
        write_reports(recorded, summary, texts)
    except (GradsightError, OSError) as error:
        return [*lines, f"There is no report: {error}"]
    return [*lines, f"report: {run.run_dir / rundir.REPORT}"]


def say_how_to_continue(run: Training, ended_by: int) -> None:
    """The command that goes on after a signal."""
    name = signal.Signals(ended_by).name
    run.progress.say(f"Stopped by {name}; the step was finished and saved. Continue with:")
    folder = shlex.quote(run.settings.results_dir)
    experiment = shlex.quote(run.settings.name)
    command = f"gradsight train --resume --results_dir {folder} --experiment {experiment}"
    run.progress.show(f"  {command}")
