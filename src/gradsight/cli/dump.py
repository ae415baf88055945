"""gradsight dump: the gradients on disk. None of these commands imports torch."""

import fnmatch
import time
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from gradsight.core import rundir
from gradsight.dump.diff import Difference, compare
from gradsight.dump.folders import find_dumps, size, step_of
from gradsight.dump.manifest import Entry, Manifest, read
from gradsight.dump.statistics import QUANTILES, Statistics, measure
from gradsight.dump.values import values
from gradsight.dump.verify import verify as check
from gradsight.errors import RunError, UsageError
from gradsight.values.sizes import format_size

app = App(
    name="dump", help="The gradients on disk: list them, look at them, check them, compare them."
)

DAMAGED = 2
BLOCKS = " ▁▂▃▄▅▆▇█"
STEP = Parameter(help="Only the dump of this step.")


@app.command(name="list")
def list_(run: Path, /) -> int:
    """List the dumps of a run: step, kind, gradients, size, ranks, what the gradient is."""
    console, table = Console(), _table()
    table.add_column("step", justify="right")
    table.add_column("kind")
    table.add_column("gradients", justify="right")
    table.add_column("size", justify="right")
    table.add_column("ranks", justify="right")
    table.add_column("written")
    table.add_column("gradient", overflow="fold")
    unreadable = []
    for folder in find_dumps(run):
        try:
            manifest = read(folder)
        except RunError as error:
            unreadable.append(str(error))
            continue
        table.add_row(*_line(manifest))
    console.print(table)
    for text in unreadable:
        console.print(f"[red]unreadable:[/] {escape(text)}", soft_wrap=True)
    for partial in sorted((run / rundir.DUMPS).glob("step*.partial")):
        console.print(f"[dim]unfinished, never read: {escape(partial.name)}[/]", soft_wrap=True)
    return DAMAGED if unreadable else 0


@app.command
def show(
    run: Path, /, *, step: Annotated[int | None, STEP] = None, parameter: str | None = None
) -> int:
    """Show the gradients of one step (default: the last): shape, norm, range and a small histogram
    of each.

    With --parameter, a name or a pattern such as '*.bias', also the quantiles of those that match.
    """
    console, folders = Console(), find_dumps(run, step)
    last = step_of(folders[-1])
    folder = next(
        folder for folder in folders if step_of(folder) == last
    )  # the full dump, where there are both
    manifest = read(folder)
    title = f"[bold]step {manifest.step}[/], {manifest.kind}, gradient: {escape(manifest.gradient)}"
    console.print(title, soft_wrap=True, highlight=False)
    names = _matching(manifest, parameter)
    shown = track(
        names, "reading", console=console, transient=True, disable=not console.is_terminal
    )
    measured = {name: measure(values(folder, name, manifest.tensors[name])) for name in shown}
    if parameter is None:
        console.print(_overview(manifest, measured))
    for name, numbers in measured.items() if parameter else ():
        _detail(console, name, manifest.tensors[name], numbers)
    for name, why in manifest.left_out.items():
        console.print(f"[yellow]left out:[/] {escape(name)}: {escape(why)}", soft_wrap=True)
    return 0


@app.command
def verify(run: Path, /, *, step: Annotated[int | None, STEP] = None) -> int:
    """Read every byte of the dumps and compare checksums; exit code 2 if anything is damaged."""
    console, damaged = Console(), 0
    folders = find_dumps(run, step)
    for folder in track(
        folders, "verifying", console=console, transient=True, disable=not console.is_terminal
    ):
        verdict = check(folder)
        label = (
            f"step {step_of(folder)} {folder.name}" if step_of(folder) is not None else str(folder)
        )
        if verdict.intact:
            console.print(
                f"[green]ok[/]       {label}: {verdict.tensors} gradients, {format_size(verdict.bytes, places=1)}",
                soft_wrap=True,
            )
            continue
        damaged += 1
        console.print(f"[red]damaged[/]  {label}", soft_wrap=True)
        for text in verdict.damage:
            console.print(f"         {escape(text)}", soft_wrap=True)
    console.print(f"{len(folders) - damaged} of {len(folders)} dumps are intact")
    return DAMAGED if damaged else 0


@app.command
def diff(
    run_a: Path,
    run_b: Path,
    /,
    *,
    step: Annotated[int | None, STEP] = None,
    tolerance: float = 0.0,
    limit: int = 20,
) -> int:
    """Compare the gradients of two runs, the worst first; exit code 2 if any differs by more than
    the tolerance.

    Parameters
    ----------
    tolerance
        Largest allowed max|a - b| / max(|a|, |b|) of a gradient. The default asks for identical values.
    limit
        How many rows to print.
    """
    if not tolerance >= 0:
        raise UsageError(f"--tolerance must be 0 or more, got {tolerance}")
    found = compare(run_a, run_b, step)
    beyond = [one for one in found if not one.relative <= tolerance]
    console = Console()
    console.print(_differences(found[: max(0, limit)], tolerance))
    if len(found) > limit:
        console.print(f"[dim]and {len(found) - limit} more; --limit shows them[/]")
    if beyond:
        console.print(
            f"[red]{len(beyond)} of {len(found)} gradients differ by more than {tolerance:g}[/]"
        )
        return DAMAGED
    console.print(f"[green]{len(found)} gradients are the same within {tolerance:g}[/]")
    return 0


def _line(manifest: Manifest) -> tuple[str, ...]:
    """One dump as a row of the list."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(manifest.created))
    text = (
        manifest.gradient
        if manifest.reason == "schedule"
        else f"{manifest.gradient} ({manifest.reason})"
    )
    counts = (
        str(len(manifest.tensors)),
        format_size(size(manifest), places=1),
        str(manifest.world_size),
    )
    return str(manifest.step), manifest.kind, *counts, when, escape(text)


def _overview(manifest: Manifest, measured: dict[str, Statistics]) -> Table:
    """A row for each gradient."""
    table = _table()
    table.add_column("parameter", overflow="fold", ratio=1)
    table.add_column("shape", no_wrap=True)
    for title in ("norm", "min", "max"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("min to max", no_wrap=True)
    for name, numbers in measured.items():
        shape = "x".join(str(length) for length in manifest.tensors[name].shape) or "scalar"
        bad = f"{numbers.nan} NaN " * bool(numbers.nan) + f"{numbers.inf} Inf" * bool(numbers.inf)
        last = f"[red]{bad}[/]" if bad else bars(numbers.histogram, 12)
        table.add_row(
            escape(name),
            shape,
            f"{numbers.norm:.2e}",
            f"{numbers.minimum:.1e}",
            f"{numbers.maximum:.1e}",
            last,
        )
    return table


def _detail(console: Console, name: str, entry: Entry, numbers: Statistics) -> None:
    """Everything about one gradient."""
    console.print(
        f"\n[bold]{escape(name)}[/]  {list(entry.shape)} {entry.dtype}".replace("[]", "scalar"),
        soft_wrap=True,
    )
    counts = (
        f"zeros {numbers.zeros:,}  NaN {numbers.nan:,}  Inf {numbers.inf:,}  of {numbers.count:,}"
    )
    console.print(f"  norm {numbers.norm:.6g}  mean {numbers.mean:.3g}  {counts}", highlight=False)
    levels = zip(QUANTILES, numbers.quantiles, strict=True)
    console.print(
        "  " + "  ".join(f"{level:.0%} {value:.3g}" for level, value in levels), highlight=False
    )
    console.print(
        f"  {numbers.minimum:.3g} |{bars(numbers.histogram)}| {numbers.maximum:.3g}",
        highlight=False,
    )
    if entry.mesh:
        console.print(
            f"  sharded over {entry.mesh}: {', '.join(entry.placements)}",
            markup=False,
            highlight=False,
        )
    if entry.ranks_disagree:
        console.print("  [yellow]the ranks did not have the same values[/]")


def _differences(found: list[Difference], tolerance: float) -> Table:
    """A row for each compared gradient."""
    table = _table()
    table.add_column("step", justify="right")
    table.add_column("parameter", overflow="fold", ratio=1)
    for title in ("max abs", "relative", "1 - cosine"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        cosine = "" if one.cosine is None else f"{max(0.0, 1 - one.cosine):.1e}"
        name = escape(one.parameter) + (f" [dim]({escape(one.note)})[/]" if one.note else "")
        style = "" if one.relative <= tolerance else "red"
        table.add_row(
            str(one.step), name, f"{one.absolute:.2e}", f"{one.relative:.2e}", cosine, style=style
        )
    return table


def bars(counts: tuple[int, ...], width: int | None = None) -> str:
    """Counts as a line of blocks; whatever is not empty is visible.

    >>> bars((0, 1, 50, 100))
    ' ▁▄█'
    """
    step = max(1, len(counts) // (width or len(counts)))
    merged = [sum(counts[start : start + step]) for start in range(0, len(counts), step)]
    tallest = max(1, *merged)
    return "".join(BLOCKS[-(-count * 8 // tallest)] for count in merged)


def _matching(manifest: Manifest, pattern: str | None) -> list[str]:
    """The names that a pattern, or a part of a name, asks for."""
    names = list(manifest.tensors)
    if pattern is None:
        return names
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)] or [
        name for name in names if pattern in name
    ]
    if not found:
        raise UsageError(
            f"no gradient matches {pattern!r}; there are {', '.join(names[:5])}{', ...' * (len(names) > 5)}"
        )
    return found


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
