"""A run from its settings: what is put together before the loop, and what is written after it."""

import shlex
import shutil
import signal
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
from gradsight.core.sharing import share_model
from gradsight.dump.dumper import GradientDumper
from gradsight.errors import GradsightError, UsageError
from gradsight.ghost.engine import GhostEngine
from gradsight.memory.apply import apply_checkpointing
from gradsight.show.markdown import report, summarize
from gradsight.show.terminal import terminal_lines, wants_colour
from gradsight.store.reader import open_run
from gradsight.store.report_file import write_report
from gradsight.store.tracker import MetricsTracker
from gradsight.train import checkpoint
from gradsight.train.batches import Batches, validation_pair
from gradsight.train.config import Settings, to_dict
from gradsight.train.data import open_corpus
from gradsight.train.evaluate import NextTokenLoss
from gradsight.train.loop import Instruments, OnBatch, Training, train
from gradsight.train.memory import advice, is_out_of_memory, startup_lines
from gradsight.train.models import architecture, model_from_settings
from gradsight.train.processes import Processes
from gradsight.train.progress import Telling
from gradsight.train.sample_texts import SampleTexts
from gradsight.train.samples import Order, Samples, read_weights
from gradsight.train.scoring import Scoring, forget_scores


def run_training(
    settings: Settings,
    *,
    resume: bool = False,
    overwrite: bool = False,
    eval_only: bool = False,
    on_batch: OnBatch | None = None,
) -> int:
    """Train, or evaluate, as the settings say; returns the exit code."""
    settings = resolved(settings)
    run_dir = Path(settings.results_dir) / settings.name
    processes = Processes(settings.device)
    try:
        if not eval_only:
            refuse_mixing(run_dir, resume, overwrite)
        run = assemble(settings, run_dir, processes, on_batch)
        if eval_only:
            return evaluate_only(run)
        make_directory(run_dir, processes, anew=not resume)
        if resume:
            go_on(run)
        if run.step >= settings.max_steps:
            run.telling.say(
                f"Nothing to do: {run.step} of {settings.max_steps} steps are made. Give a larger --max_steps"
            )
            return 0
        introduce(run)
        with instruments(run) as tools:
            ended_by = train(run, tools)
        return finish(run, ended_by)
    except KeyboardInterrupt:
        if processes.first:
            print("Stopped at once, without saving", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        if is_out_of_memory(error):
            raise GradsightError(
                advice(settings, processes.device, run_dir / rundir.CONFIG)
            ) from error
        raise
    finally:
        processes.close()


def resolved(settings: Settings) -> Settings:
    """The settings with what follows from others filled in, so that config.json says all."""
    size = settings.block_size or architecture(settings.architecture).block_size
    given = (settings.data, settings.data_weights, settings.tokenizer)
    data, weights, tokenizer = (
        None if path is None else str(Path(path).absolute()) for path in given
    )
    settings = replace(settings, data=data, data_weights=weights, tokenizer=tokenizer)
    return replace(settings, block_size=size, experiment=settings.name)


def refuse_mixing(run_dir: Path, resume: bool, overwrite: bool) -> None:
    """Refuse to put two runs into one directory, or to resume what is not there."""
    there = rundir.is_run(run_dir)
    if resume and checkpoint.newest(run_dir) is None:
        what = "has no checkpoint yet" if there else "is not there"
        raise UsageError(
            f"--resume: {run_dir} {what}. Start it without --resume{' and with --overwrite' if there else ''}"
        )
    if there and not resume and not overwrite:
        raise UsageError(
            f"{run_dir} holds a run already. Continue it with --resume, replace it with --overwrite, "
            f"or name this one with --experiment NAME"
        )


def make_directory(run_dir: Path, processes: Processes, anew: bool) -> None:
    """Make the run directory, and remove the run that is replaced: only now, when all else has been
    found in order.
    """
    processes.wait()
    if processes.first:
        if anew and rundir.is_run(run_dir):
            shutil.rmtree(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
    processes.wait()


def assemble(
    settings: Settings, run_dir: Path, processes: Processes, on_batch: OnBatch | None
) -> Training:
    """Put together everything that the loop needs."""
    assert settings.block_size is not None
    samples = Samples(open_corpus(settings.data), settings.block_size)
    weights = (
        np.ones(len(samples))
        if settings.data_weights is None
        else read_weights(settings.data_weights, samples)
    )
    model, optimizer = build(settings, processes)
    loss = NextTokenLoss(settings.train_dtype, processes.device)
    vocabulary = settings.model.vocab_size or architecture(settings.architecture).vocabulary
    batches = Batches(
        samples,
        Order(weights, settings.seed),
        settings.batch_size,
        settings.gradient_accumulation_steps,
        processes.rank,
        processes.world,
        vocabulary,
        processes.device,
    )
    telling = Telling(
        settings.max_steps, batches.per_step * settings.block_size, speaks=processes.first
    )
    return Training(
        settings, run_dir, processes, model, optimizer, loss, batches, telling, on_batch
    )


def build(settings: Settings, processes: Processes) -> tuple[nn.Module, Optimizer]:
    """The model as the processes share it, and its optimizer. Initial weights depend on the seed
    alone.
    """
    torch.manual_seed(settings.seed)
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
    adam = settings.optimizer
    groups = [
        {
            "params": [p for p in model.parameters() if p.dim() >= 2],
            "weight_decay": adam.weight_decay,
        },
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return model, AdamW(
        groups, lr=settings.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps
    )


def introduce(run: Training) -> None:
    """Say what is going to be trained on what, and what memory it will take."""
    samples, settings, order = run.batches.samples, run.settings, run.batches.order
    if run.processes.first:
        domains = samples.corpus.domains
        what = settings.data or "the source of Python's standard library"
        run.telling.say(
            f"Data: {what}: {order.epoch_length:,} samples of {settings.block_size} tokens, {len(domains)} domains"
        )
        if settings.startup_report:
            with run.telling.working("Predicting memory"):
                lines = startup_lines(settings, run.processes.device)
            for line in lines:
                run.telling.say(line)
        steps = f"{settings.max_steps:,} steps of {run.batches.per_step} samples"
        run.telling.say(
            f"Training: {settings.architecture}, {settings.method}, {steps}, into {run.run_dir}"
        )
    run.processes.wait()


@contextmanager
def instruments(run: Training) -> Iterator[Instruments]:
    """The instruments that the settings ask for; closed, they have written everything."""
    settings, callbacks, processes = run.settings, run.settings.trainer.callbacks, run.processes
    dump = asdict(callbacks.grad_dump)
    dumper = GradientDumper(run.run_dir, **dump) if dump["enabled"] or dump["dump_on"] else None
    engine = make_engine(run) if settings.method == "GradDotProd" else None
    scoring = Scoring(engine, run.problems)
    tracker = MetricsTracker(run.run_dir if processes.first else None)
    went_well = False
    try:
        yield Instruments(scoring, dumper, tracker)
        went_well = True
    finally:
        tracker.close()
        if (
            went_well or processes.world == 1
        ):  # else the other processes would be waited for in vain
            scoring.close()
            if dumper is not None:
                dumper.close()


def make_engine(run: Training) -> GhostEngine:
    """The engine that scores training samples against the validation batch."""
    settings, processes = run.settings, run.processes
    val, wanted = run.batches.samples.of("val"), settings.val_batch_size
    target = validation_pair(
        val, wanted, processes.rank, processes.world, run.batches.vocabulary, processes.device
    )
    options = asdict(settings.trainer.callbacks.ghost)
    if processes.world > 1 and settings.parallel == "fsdp" and settings.train_dtype == "bfloat16":
        options["self_check"] = (
            False  # right scores are refused there: the twin's rounding is not the sharded model's
        )
    return GhostEngine(
        run.model,
        run.loss,
        target,
        optimizer=run.optimizer,
        run_dir=run.run_dir,
        save_interval=settings.dot_prod_save_interval,
        **options,
    )


def go_on(run: Training) -> None:
    """Take up the newest checkpoint, and forget the scores of steps that will be made again."""
    folder = checkpoint.newest(run.run_dir)
    assert folder is not None
    facts = checkpoint.load(folder, run.model, run.optimizer, run.processes)
    if facts["data"] != run.batches.samples.fingerprint:
        raise UsageError(
            f"--resume: {run.run_dir} was trained on other data: the order of samples would not be the same"
        )
    run.step, run.position, run.seconds = facts["step"], facts["position"], facts["seconds"]
    run.telling.start_at(run.step)
    run.telling.say(f"Resuming after step {run.step}")
    if run.processes.first:
        forget_scores(run.run_dir, run.step)
    run.processes.wait()


def evaluate_only(run: Training) -> int:
    """Print the losses of the newest checkpoint, or of the initial weights."""
    folder = checkpoint.newest(run.run_dir)
    if folder is None:
        run.telling.say(f"Evaluating the initial weights: {run.run_dir} has no checkpoint")
    else:
        facts = checkpoint.load(folder, run.model, None, run.processes)
        run.telling.say(f"Evaluating {folder}: the weights after {facts['step']} steps")
    for name, value in run.evaluate().items():
        run.telling.say(f"  {name:<10} {'-' if value is None else format(value, '.4f')}")
    return 0


def finish(run: Training, ended_by: int | None) -> int:
    """Write the report, say how it went and where everything is; gives the exit code."""
    if run.processes.first:
        summary = summarize(open_run(run.run_dir))
        write_report(run.run_dir / rundir.REPORT, report(summary, SampleTexts(run.run_dir)))
        for name in (
            name for name in run.memory if name.endswith(("peak_rss_gb", "gpu_max_allocated_gb"))
        ):
            run.telling.say(f"{name}: {run.memory[name]:.3f}")
        run.telling.say(f"{run.step} steps in {run.seconds:.0f} s")
        health = summary.health
        for line in (
            terminal_lines(health, wants_colour(sys.stdout))
            if health.findings
            else [summary.verdict]
        ):
            run.telling.show(line)
        if ended_by is not None:
            run.telling.say(
                f"Stopped by {signal.Signals(ended_by).name}; the step was finished and saved. Continue with:"
            )
            folder, name = (
                shlex.quote(str(part)) for part in (run.settings.results_dir, run.settings.name)
            )
            run.telling.show(
                f"  gradsight train --resume --results_dir {folder} --experiment {name}"
            )
        run.telling.show(f"report: {run.run_dir / rundir.REPORT}")
    return 0 if ended_by is None else 128 + ended_by
