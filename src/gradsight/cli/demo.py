"""gradsight demo"""

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from gradsight.cli.report import write_report

_STEPS = 150
_LENGTH = 128
_BATCH = 16


def demo(*, run_dir: Path | None = None) -> int:
    """Train a small GPT on the Python standard library's source under Gradsight, and write a report. No arguments needed.

    Parameters
    ----------
    run_dir
        Where the run goes; by default a new directory under runs/.
    """
    run_dir = run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    print(f"Training a small GPT on the Python standard library's own source; the record goes to {run_dir}.")
    seconds = _train(run_dir)

    from gradsight.record.reader import open_run
    from gradsight.show.markdown import report, summarize

    summary = summarize(open_run(run_dir))
    file = run_dir / "report.md"
    write_report(file, report(summary))
    first, last = summary.steps[0], summary.steps[-1]
    print(f"{len(summary.steps)} steps in {seconds:.0f} s: loss {first.loss:.3f} → {last.loss:.3f}")
    print(summary.verdict)
    print(f"report: {file}")
    return 0


def _train(run_dir: Path) -> float:
    import numpy as np
    import torch

    from gradsight.records import Schedule
    from gradsight.train.data import sample_windows, standard_library
    from gradsight.train.gpt import GPT, GPTConfig, next_token_loss
    from gradsight.watch import watch

    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    text = np.concatenate(list(standard_library().parts["train"].values()))
    model = GPT(GPTConfig(block_size=_LENGTH, width=192, heads=6, layers=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    started = time.perf_counter()
    with watch(model, optimizer, run_dir=run_dir, histograms=Schedule(step_interval=25)) as watched, _progress() as progress:
        task = progress.add_task("training", total=_STEPS, loss="")
        for step in range(_STEPS):
            windows = torch.from_numpy(sample_windows(text, _LENGTH + 1, _BATCH, generator))
            loss = next_token_loss(model(windows[:, :-1]), windows[:, 1:])
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            watched.log(loss=loss)
            progress.update(task, advance=1, loss=f"loss {loss.item():.3f}")
            if not sys.stdout.isatty() and step % 25 == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return time.perf_counter() - started


def _progress() -> Progress:
    """A bar on a terminal; elsewhere plain lines are printed instead."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stdout.isatty())
