"""gradsight demo"""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gradsight.cli.demo_summary import demo_summary
from gradsight.core import rundir
from gradsight.dump.reader import dumps_in
from gradsight.errors import UsageError
from gradsight.show.run_report import write_reports
from gradsight.show.summary import summarize
from gradsight.show.text import wants_colour
from gradsight.store.reader import open_run
from gradsight.train.models import refuse_without_transformers
from gradsight.train.sample_texts import SampleTexts

if TYPE_CHECKING:
    from gradsight.train.demonstration import Demonstration

NOT_FOUND = 2
RunDir = Annotated[Path | None, Parameter(name="--run_dir")]


def demo(*, run_dir: RunDir = None) -> int:
    """Train a small GPT with every instrument at work, and find a planted fault.

    It learns the source of Python's standard library: about a minute, no arguments needed, nothing
    is downloaded. One sample of one batch is poisoned on the way; the demo exits with 0 if the
    flight recorder names it, and with 2 if it does not.

    Parameters
    ----------
    run_dir
        Where the run goes; by default a new directory under runs/.
    """
    started = time.perf_counter()
    place = run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if rundir.is_run(place):
        raise UsageError(f"{place} holds a run already; give a directory of its own")
    refuse_without_transformers("of the demo")
    print("A small GPT learns the source of Python's standard library, with all five")
    print("instruments at work. On the way one sample of one batch is poisoned.\n", flush=True)
    with stage("loading torch and transformers"):
        import torch

        from gradsight.train.demonstration import Demonstration

    # So small a model gains little from a second thread, and on a busy machine loses minutes.
    torch.set_num_threads(1)
    code = perform(Demonstration(), place)
    print(f"{time.perf_counter() - started:.0f} s in all.")
    return code


@contextmanager
def stage(what: str) -> Iterator[None]:
    """A line that says what is being done, and at its end how long it took."""
    started = time.perf_counter()
    print(f"{what} ...", end="", flush=True)
    try:
        yield
    except BaseException:
        print()  # what went wrong begins a line of its own
        raise
    print(f" {time.perf_counter() - started:.1f} s", flush=True)


def perform(planned: "Demonstration", run_dir: Path) -> int:
    """Measure memory, train, and show what came of it; returns the exit code."""
    from gradsight.train.demonstration import measure_memory, perform_training

    with stage("measuring a step's memory, plain and with activation checkpointing"):
        memory = measure_memory(planned)
    print(f"training {planned.steps} steps, into {run_dir}:", flush=True)
    started = time.perf_counter()
    performance = perform_training(planned, run_dir, memory)
    print(f"trained in {time.perf_counter() - started:.1f} s", flush=True)
    if performance.ended_by is not None:
        print(f"Stopped by {signal.Signals(performance.ended_by).name}")
        return 128 + performance.ended_by
    return show_demonstration(run_dir, planned, performance.poisoned)


def show_demonstration(run_dir: Path, planned: "Demonstration", poisoned: int) -> int:
    """Write the report, print its essence, give the exit code: 0 if the planted fault was found."""
    with stage("reading the record and writing the report"):
        texts = SampleTexts(run_dir)
        run = open_run(run_dir)
        summary = summarize(run, dumps_in(run_dir))
        write_reports(run, summary, texts)
    print()
    found, lines = demo_summary(
        run_dir, summary, texts, planned, poisoned, wants_colour(sys.stdout)
    )
    print("\n".join(lines))
    print(f"\nThe report: {run_dir / rundir.REPORT}")
    print(f"The page:   {run_dir / rundir.PAGE}")
    print(f"More:       gradsight influence {run_dir}")
    print(f"            gradsight dump show {run_dir}")
    return 0 if found else NOT_FOUND
