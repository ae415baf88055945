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
from gradsight.values.plain import listed
from gradsight.values.sizes import format_size

app = App(
    name="dump", help="The gradients on disk: list them, look at them, check them, compare them."
)

DAMAGED = 2
_MOST_STEPS = 8
BLOCKS = " ▁▂▃▄▅▆▇█"
STEP = Parameter(help="Only the dump of this step.")


@app.command(name="list")
def list_dumps(run: Path, /) -> int:
    """List the dumps of a run: step, kind, size, ranks, why, and what the gradient is."""
    console = Console()
    table = _table()
    table.add_column("step", justify="right")
    table.add_column("kind")
    table.add_column("gradients", justify="right")
    table.add_column("size", justify="right")
    table.add_column("ranks", justify="right")
    table.add_column("written")
    table.add_column("why", overflow="fold")
    unreadable = []
    shown: list[Manifest] = []
    for folder in find_dumps(run):
        try:
            manifest = read(folder)
        except RunError as error:
            unreadable.append(str(error))
            continue
        table.add_row(*_line(manifest))
        shown.append(manifest)
    console.print(table)
    for text in _what_they_are(shown):
        console.print(text, soft_wrap=True, markup=False, highlight=False)
    for text in unreadable:
        console.print(f"[red]unreadable:[/] {escape(text)}", soft_wrap=True)
    for partial in sorted((run / rundir.DUMPS).glob("step*.partial")):
        console.print(f"[dim]unfinished, never read: {escape(partial.name)}[/]", soft_wrap=True)
    return DAMAGED if unreadable else 0


@app.command(name="show")
def show_dump(
    run: Path, /, *, step: Annotated[int | None, STEP] = None, parameter: str | None = None
) -> int:
    """Show the gradients of one step: shape, norm, range and a small histogram of each.

    By default of the last step. With --parameter, a name or a pattern such as '*.bias', also the
    quantiles of those that match.
    """
    console = Console()
    folders = find_dumps(run, step)
    last = [folder for folder in folders if step_of(folder) == step_of(folders[-1])]
    folder = last[0]  # the full dump, where there are both
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
    else:
        for name, numbers in measured.items():
            _detail(console, name, manifest.tensors[name], numbers)
    for name, why in manifest.left_out.items():
        console.print(f"[yellow]left out:[/] {escape(name)}: {escape(why)}", soft_wrap=True)
    return 0


@app.command(name="verify")
def verify_dumps(run: Path, /, *, step: Annotated[int | None, STEP] = None) -> int:
    """Read every byte of the dumps and compare checksums; exit code 2 if anything is damaged."""
    console = Console()
    damaged = 0
    folders = find_dumps(run, step)
    quiet = not console.is_terminal
    for folder in track(folders, "verifying", console=console, transient=True, disable=quiet):
        verdict = check(folder)
        label = str(folder)
        if step_of(folder) is not None:
            label = f"step {step_of(folder)} {folder.name}"
        if verdict.intact:
            content = f"{verdict.tensors} gradients, {format_size(verdict.bytes, places=1)}"
            console.print(f"[green]ok[/]       {label}: {content}", soft_wrap=True)
            continue
        damaged += 1
        console.print(f"[red]damaged[/]  {label}", soft_wrap=True)
        for text in verdict.damage:
            console.print(f"         {escape(text)}", soft_wrap=True)
    console.print(f"{len(folders) - damaged} of {len(folders)} dumps are intact")
    return DAMAGED if damaged else 0


@app.command(name="diff")
def diff_dumps(
    run_a: Path,
    run_b: Path,
    /,
    *,
    step: Annotated[int | None, STEP] = None,
    tolerance: float = 0.0,
    limit: int = 20,
) -> int:
    """Compare the gradients of two runs, the worst first.

    Exit code 2 if any differs by more than the tolerance.

    Parameters
    ----------
    tolerance
        Largest allowed max|a - b| / max(|a|, |b|) of a gradient. The default asks for identical
        values.
    limit
        How many rows to print.
    """
    if not tolerance >= 0:
        raise UsageError(f"--tolerance must be 0 or more, got {tolerance}")
    if limit < 0:
        raise UsageError(f"--limit must be 0 or more, got {limit}")
    differences = compare(run_a, run_b, step)
    # Not `>`: a difference that is not a number is beyond every tolerance.
    beyond = [one for one in differences if not one.relative <= tolerance]
    console = Console()
    console.print(_differences(differences[:limit], tolerance))
    count = len(differences)
    if count > limit:
        console.print(f"[dim]and {count - limit} more; --limit shows them[/]")
    if beyond:
        console.print(
            f"[red]{len(beyond)} of {count} gradients differ by more than {tolerance:g}[/]"
        )
        return DAMAGED
    console.print(f"[green]{count} gradients are the same within {tolerance:g}[/]")
    return 0


def _line(manifest: Manifest) -> tuple[str, ...]:
    """One dump as a row of the list."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(manifest.created))
    return (
        str(manifest.step),
        manifest.kind,
        str(len(manifest.tensors)),
        format_size(size(manifest), places=1),
        str(manifest.world_size),
        when,
        escape(" ".join(manifest.codes) or manifest.reason),
    )


def _what_they_are(manifests: list[Manifest]) -> list[str]:
    """Below the list, where lines may be long: the findings' names, and what the gradients are."""
    lines = [f"step {manifest.step}: {manifest.reason}" for manifest in manifests if manifest.codes]
    steps_by_gradient: dict[str, list[str]] = {}
    for manifest in manifests:
        steps_by_gradient.setdefault(manifest.gradient, []).append(str(manifest.step))
    for gradient, steps in steps_by_gradient.items():
        where = f" (step {listed(steps, _MOST_STEPS)})"
        if len(steps_by_gradient) == 1:
            where = ""
        lines.append(f"gradient{where}: {gradient}")
    return lines


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
        last = bars(numbers.histogram, 12)
        if numbers.nan or numbers.inf:
            bad = f"{numbers.nan} NaN " * bool(numbers.nan)
            bad += f"{numbers.inf} Inf" * bool(numbers.inf)
            last = f"[red]{bad}[/]"
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


def _differences(differences: list[Difference], tolerance: float) -> Table:
    """A row for each compared gradient."""
    table = _table()
    table.add_column("step", justify="right")
    table.add_column("parameter", overflow="fold", ratio=1)
    for title in ("max abs", "relative", "1 - cosine"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in differences:
        name = escape(one.parameter)
        if one.note:
            name += f" [dim]({escape(one.note)})[/]"
        cosine = ""
        if one.cosine is not None:
            cosine = f"{max(0.0, 1 - one.cosine):.1e}"
        absolute = f"{one.absolute:.2e}"
        relative = f"{one.relative:.2e}"
        style = "" if one.relative <= tolerance else "red"
        table.add_row(str(one.step), name, absolute, relative, cosine, style=style)
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
    if not pattern:
        raise UsageError("--parameter must be a name or a pattern, such as '*.bias', got nothing")
    matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not matching:
        matching = [name for name in names if pattern in name]
    if not matching:
        few = ", ".join(names[:5])
        if len(names) > 5:
            few += ", ..."
        raise UsageError(f"no gradient matches {pattern!r}; there are {few}")
    return matching


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
