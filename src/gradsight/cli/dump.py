"""gradsight dump: the gradients on disk. None of these commands imports torch."""

import fnmatch
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from gradsight.core import limits, rundir
from gradsight.dump.diff import Difference, compare
from gradsight.dump.folders import find_dumps, manifest_bytes, size, step_folders, step_of
from gradsight.dump.manifest import Entry, Manifest, read
from gradsight.dump.statistics import QUANTILES, Statistics, measure
from gradsight.dump.values import StoredValues
from gradsight.dump.verify import verify as check
from gradsight.errors import DIFFERENT, RunError, UsageError
from gradsight.values.plain import listed
from gradsight.values.sizes import format_size
from gradsight.values.texts import cleaned, for_terminal

app = App(
    name="dump", help="The gradients on disk: list them, look at them, check them, compare them."
)

DAMAGED = 2
_MOST_STEPS = 8
_MOST_LEFT_OUT = 50
_MOST_DAMAGE = 100
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
    shown: list[_Listed] = []
    folders = find_dumps(run)
    room = limits.MANIFESTS_BYTES
    looked_at = 0
    for folder in folders:
        room -= manifest_bytes(folder)
        if room < 0 and looked_at:
            break
        looked_at += 1
        try:
            manifest = read(folder)
        except RunError as error:
            unreadable.append(for_terminal(str(error)))
            continue
        table.add_row(*_line(manifest))
        # Not the manifest: those of all dumps of a run may take more memory than there is.
        shown.append(_Listed(manifest.step, manifest.reason, manifest.codes, manifest.gradient))
    console.print(table)
    if looked_at < len(folders):
        console.print(f"{len(folders) - looked_at} more: `gradsight dump list` of a step shows it")
    for text in _what_they_are([cleaned(each, for_terminal) for each in shown]):
        console.print(text, soft_wrap=True, markup=False, highlight=False)
    for text in unreadable:
        console.print(f"[red]unreadable:[/] {escape(text)}", soft_wrap=True)
    for partial in sorted(step_folders(run, rundir.DUMPS, ".partial")):
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
    kind = f"{manifest.kind}, gradient: {_safe(manifest.gradient)}"
    console.print(f"[bold]step {manifest.step}[/], {kind}", soft_wrap=True, highlight=False)
    names = _matching(manifest, parameter)
    small = _small_enough(manifest, names)
    shown = track(
        small, "reading", console=console, transient=True, disable=not console.is_terminal
    )
    measured: dict[str, Statistics | None] = dict.fromkeys(names)
    for name in shown:
        measured[name] = measure(StoredValues(folder, name, manifest.tensors[name]))
    if parameter is None:
        console.print(_overview(manifest, measured))
    else:
        for name, numbers in measured.items():
            _detail(console, name, manifest.tensors[name], numbers)
    if len(small) < len(names):
        console.print(
            f"{len(names) - len(small)} gradients were not measured: they are beyond the "
            f"{limits.ENTRIES_MEASURED:,} entries of one look; --parameter chooses others",
            soft_wrap=True,
        )
    for name, why in list(manifest.left_out.items())[:_MOST_LEFT_OUT]:
        console.print(f"[yellow]left out:[/] {_safe(name)}: {_safe(why)}", soft_wrap=True)
    more = len(manifest.left_out) - _MOST_LEFT_OUT
    if more > 0:
        console.print(f"[yellow]left out:[/] {more} more")
    return 0


def _safe(text: str) -> str:
    """A stranger's text, in which neither the terminal nor rich finds anything to obey."""
    return escape(for_terminal(text))


def _small_enough(manifest: Manifest, names: list[str]) -> list[str]:
    """The first gradients that together have no more entries than one look takes."""
    small = []
    entries = 0
    for name in names:
        entries += math.prod(manifest.tensors[name].shape)
        if entries > limits.ENTRIES_MEASURED:
            break
        small.append(name)
    return small


@app.command(name="verify")
def verify_dumps(run: Path, /, *, step: Annotated[int | None, STEP] = None) -> int:
    """Read every byte of the dumps and compare checksums.

    Exits with 0 if all are intact, 2 if any is damaged.
    """
    console = Console()
    damaged = 0
    folders = find_dumps(run, step)
    quiet = not console.is_terminal
    for folder in track(folders, "verifying", console=console, transient=True, disable=quiet):
        verdict = check(folder)
        label = _safe(str(folder))
        if step_of(folder) is not None:
            label = f"step {step_of(folder)} {folder.name}"
        if verdict.intact:
            content = f"{verdict.tensors} gradients, {format_size(verdict.bytes, places=1)}"
            console.print(f"[green]ok[/]       {label}: {content}", soft_wrap=True)
            continue
        damaged += 1
        console.print(f"[red]damaged[/]  {label}", soft_wrap=True)
        for text in verdict.damage[:_MOST_DAMAGE]:
            console.print(f"         {_safe(text)}", soft_wrap=True)
        if len(verdict.damage) > _MOST_DAMAGE:
            console.print(f"         and {len(verdict.damage) - _MOST_DAMAGE} more")
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

    Exits with 0 if all agree within the tolerance, 1 if any differs by more, 2 if a dump is
    damaged, and 64 for wrong usage, including a missing folder and runs without a common step.

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
        return DIFFERENT
    console.print(f"[green]{count} gradients are the same within {tolerance:g}[/]")
    return 0


@dataclass(frozen=True, slots=True)
class _Listed:
    """What is said of a dump below the list."""

    step: int
    reason: str
    codes: tuple[str, ...]
    gradient: str


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
        _safe(" ".join(manifest.codes) or manifest.reason),
    )


def _what_they_are(manifests: list[_Listed]) -> list[str]:
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


def _overview(manifest: Manifest, measured: dict[str, Statistics | None]) -> Table:
    """A row for each gradient."""
    table = _table()
    table.add_column("parameter", overflow="fold", ratio=1)
    table.add_column("shape", no_wrap=True)
    for title in ("norm", "min", "max"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("min to max", no_wrap=True)
    for name, numbers in measured.items():
        shape = "x".join(str(length) for length in manifest.tensors[name].shape) or "scalar"
        if numbers is None:
            table.add_row(_safe(name), shape)
            continue
        last = bars(numbers.histogram, 12)
        if numbers.nan or numbers.inf:
            bad = f"{numbers.nan} NaN " * bool(numbers.nan)
            bad += f"{numbers.inf} Inf" * bool(numbers.inf)
            last = f"[red]{bad}[/]"
        table.add_row(
            _safe(name),
            shape,
            f"{numbers.norm:.2e}",
            f"{numbers.minimum:.1e}",
            f"{numbers.maximum:.1e}",
            last,
        )
    return table


def _detail(console: Console, name: str, entry: Entry, numbers: Statistics | None) -> None:
    """Everything about one gradient."""
    console.print(
        f"\n[bold]{_safe(name)}[/]  {list(entry.shape)} {entry.dtype}".replace("[]", "scalar"),
        soft_wrap=True,
    )
    if numbers is None:
        return
    counts = (
        f"zeros {numbers.zeros:,}  NaN {numbers.nan:,}  Inf {numbers.inf:,}  of {numbers.count:,}"
    )
    console.print(f"  norm {numbers.norm:.6g}  mean {numbers.mean:.3g}  {counts}", highlight=False)
    if numbers.quantiles:
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
            for_terminal(f"  sharded over {entry.mesh}: {', '.join(entry.placements)}"),
            markup=False,
            highlight=False,
        )


def _differences(differences: list[Difference], tolerance: float) -> Table:
    """A row for each compared gradient."""
    table = _table()
    table.add_column("step", justify="right")
    table.add_column("parameter", overflow="fold", ratio=1)
    for title in ("max abs", "relative", "1 - cosine"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in differences:
        name = _safe(one.parameter)
        if one.note:
            name += f" [dim]({_safe(one.note)})[/]"
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
