"""gradsight demo"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from gradsight.core import rundir
from gradsight.show.terminal import wants_colour
from gradsight.store.report_file import write_report
from gradsight.train.sample_texts import SampleTexts

if TYPE_CHECKING:
    from gradsight.train.demonstration import Demonstration

NOT_FOUND = 2


def demo(*, run_dir: Path | None = None) -> int:
    """Train a small GPT on the Python standard library's source with every instrument at work, and
    find a planted fault.

    About a minute, no arguments needed, nothing is downloaded. One sample of one batch is poisoned
    on the way; the demo exits with 0 if the flight recorder names it, and with 2 if it does not.

    Parameters
    ----------
    run_dir
        Where the run goes; by default a new directory under runs/.
    """
    started = time.perf_counter()
    print("A small GPT learns the source of Python's standard library, with all five")
    print("instruments at work. On the way one sample of one batch is poisoned.\n", flush=True)
    import torch

    from gradsight.train.demonstration import Demonstration

    torch.set_num_threads(
        1
    )  # so small a model gains little from a second one, and on a busy machine loses minutes
    code = perform(Demonstration(), run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S"))
    print(f"{time.perf_counter() - started:.0f} s in all.")
    return code


def perform(planned: "Demonstration", run_dir: Path) -> int:
    """Measure memory, train, and show what came of it; returns the exit code."""
    from gradsight.train.demonstration import measure_memory, run

    print("measuring the memory of a step, plain and with activation checkpointing", flush=True)
    memory = measure_memory(planned)
    with _telling(planned.steps) as tell:
        poisoned = run(planned, run_dir, memory, tell)
    print()
    return show(run_dir, planned, poisoned)


def show(run_dir: Path, planned: "Demonstration", poisoned: int) -> int:
    """Write the report, print what it comes to, and give the exit code: 0 if the planted fault was
    found.
    """
    from gradsight.cli.demo_summary import outline
    from gradsight.show.markdown import report, summarize
    from gradsight.store.reader import open_run

    run, texts = open_run(run_dir), SampleTexts(run_dir)
    summary = summarize(run)
    write_report(run_dir / rundir.REPORT, report(summary, texts))
    found, lines = outline(run, summary, texts, planned, poisoned, wants_colour(sys.stdout))
    print("\n".join(lines))
    print(f"\nThe report: {run_dir / rundir.REPORT}")
    print(f"More:       gradsight influence {run_dir}")
    print(f"            gradsight dump show {run_dir}")
    return 0 if found else NOT_FOUND


@contextmanager
def _telling(steps: int) -> Iterator[Callable[[int, float], None]]:
    """A bar on a terminal, plain lines elsewhere."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    terminal = sys.stdout.isatty()
    with Progress(*columns, console=Console(), disable=not terminal, transient=True) as progress:
        task = progress.add_task("training", total=steps, loss="")

        def tell(step: int, loss: float) -> None:
            progress.update(task, advance=1, loss=f"step {step}  loss {loss:.2f}")
            if not terminal and (step % 20 == 0 or step == steps - 1):
                print(f"training: step {step} of {steps}, loss {loss:.2f}", flush=True)

        yield tell
