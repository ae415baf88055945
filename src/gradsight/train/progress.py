"""What a run says of itself: a bar on a terminal, plain lines elsewhere."""

import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_WIDTH = 80
PEAKS = ("memory/peak_rss_gb", "memory/gpu_max_allocated_gb")
"""What a run took at most, as a process and on a GPU."""


class Progress:
    """Progress of a run; silent on all processes but the first."""

    def __init__(self, total: int, tokens_per_step: int, speaks: bool) -> None:
        self.console = Console(quiet=not speaks, highlight=False)
        self._total = total
        self._tokens_per_step = tokens_per_step
        self._done = 0
        self._resumed_at = 0
        self._since = time.perf_counter()
        self._bar = Bar(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(None),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (speaks and self.console.is_terminal),
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, numbers="")

    def start_at(self, step: int) -> None:
        """So many steps are made already."""
        self._done = step
        self._resumed_at = step
        self._bar.update(self._task, completed=step)

    def __enter__(self) -> "Progress":
        self._since = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """A step was made."""
        self._done += 1
        self._bar.update(self._task, completed=self._done)

    def pause(self, seconds: float) -> None:
        """Time spent on something else than steps."""
        self._since += seconds

    def numbers(self, loss: float, norm: float, memory: Mapping[str, float]) -> None:
        """The numbers of the last step."""
        seconds = (time.perf_counter() - self._since) / max(1, self._done - self._resumed_at)
        rate = self._tokens_per_step / seconds if seconds else 0.0
        place = f"step {self._done}/{self._total}"
        if not self._bar.disable:
            text = f"loss {loss:.3f} norm {norm:.2f} {rate:,.0f} tok/s"
            self._bar.update(self._task, numbers=text)
            self.say(f"{place}{_memory_in_use(memory)}")
            return
        left = _duration(seconds * (self._total - self._done))
        # Never broken: logs are searched by the line.
        self.show(
            f"{place}  loss {loss:.3f}  norm {norm:.2f}  {rate:,.0f} tokens/s  {left} left"
            f"{_memory_in_use(memory)}"
        )

    def say(self, text: str) -> None:
        """A sentence, broken between words to lines that fit; all but the first are indented."""
        width = min(self.console.width, _WIDTH)
        lines = textwrap.wrap(
            text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        for line in lines or [""]:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, line: str) -> None:
        """A line that is to be copied, or brings its own colours: printed as it is."""
        if not self.console.quiet:
            self.console.file.write(f"{line}\n")
            self.console.file.flush()

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Something that takes a while: a spinner on a terminal, nothing elsewhere."""
        if self.console.is_terminal and not self.console.quiet:
            with self.console.status(f"{what} ...", spinner="line"):
                yield
        else:
            yield


def _memory_in_use(memory: Mapping[str, float]) -> str:
    """The memory as the end of a line: the process's peak, or all that is known of a GPU's."""
    shown = [name for name in memory if name in PEAKS or name.startswith("memory/gpu_")]
    return "".join(f"  {name}: {memory[name]:.3f}" for name in shown)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"
