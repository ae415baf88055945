"""The table of `gradsight memory predict`: what each model takes, plain and checkpointed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradsight.cli.memory_step import Device, StepOptions
from gradsight.values.memory import MemoryUse
from gradsight.values.sizes import format_size


@dataclass(frozen=True)
class PredictionOptions:
    """What is predicted of every model of a table."""

    policy: str
    device: Device
    limit: int | None
    """Bytes for which the largest batch is looked for; None: it is not."""
    step: StepOptions

    def __str__(self) -> str:
        return f"{self.device}, optimizer {self.step.optimizer}, policy {self.policy}"


@dataclass(frozen=True)
class PredictedRow:
    """One line of the table of predictions."""

    model: str
    parameters: int
    batch: str
    plain: MemoryUse
    checkpointed: MemoryUse
    largest: tuple[int, int] | None = None
    """The largest batch that fits, plain and checkpointed, where that was asked for."""


def predicted_row(
    options: PredictionOptions, build: Callable[[], Any], name: str | None, *, title: str
) -> PredictedRow:
    """Predict one model, plain and checkpointed; `name` is that of a built-in one."""
    from gradsight.memory.predict import count_parameters, predict_peak_memory

    optimizer = options.step.optimizer_name
    plain = predict_peak_memory(build, optimizer=optimizer, device=options.device)
    checkpointed = predict_peak_memory(
        build,
        policy=options.policy,
        optimizer=optimizer,
        device=options.device,
        blocks=options.step.block_names,
    )
    parameters = count_parameters(build)
    if name is None:
        return PredictedRow(title, parameters, "", plain, checkpointed)
    samples, tokens = options.step.batch_shape(name)
    return PredictedRow(
        title,
        parameters,
        f"{samples}x{tokens}",
        plain,
        checkpointed,
        largest_batches(options, name),
    )


def largest_batches(options: PredictionOptions, name: str) -> tuple[int, int] | None:
    """The largest batches of a built-in model that fit, plain and checkpointed."""
    from gradsight.memory.predict import largest_batch

    if options.limit is None:
        return None
    plain, checkpointed = [
        largest_batch(
            partial(options.step.sized, name),
            options.limit,
            policy=policy,
            optimizer=options.step.optimizer_name,
            device=options.device,
        )
        for policy in (None, options.policy)
    ]
    return plain, checkpointed


def show_predictions(
    console: Console, rows: list[PredictedRow], options: PredictionOptions
) -> None:
    """Print the table of predictions, and what it does not know."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("model", overflow="fold")
    for name in ("params", "batch", "plain", "checkpointed", "saved", "ceiling"):
        table.add_column(name, justify="right")
    if options.limit is not None:
        table.add_column("largest batch", justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    console.print()
    console.print(table)
    text = f"Predicted for {options}. Ceiling: activations' share of the plain peak."
    if options.limit is not None:
        fits = format_size(options.limit)
        text += f" Largest batch: that fits {fits}, plain and checkpointed."
    console.print(f"\n[dim]{text}[/]", highlight=False)
    for note in dict.fromkeys(note for row in rows for note in row.plain.notes):
        console.print(f"[dim]- {escape(note)}[/]", highlight=False)


def _cells(row: PredictedRow) -> list[str]:
    """The row's texts, column by column."""
    saved = 1 - row.checkpointed.peak_bytes / row.plain.peak_bytes
    cells = [
        row.model,
        _count(row.parameters),
        row.batch,
        format_size(row.plain.peak_bytes),
        format_size(row.checkpointed.peak_bytes),
        f"{saved:.1%}",
        f"{row.plain.activation_share:.1%}",
    ]
    if row.largest is not None:
        cells.append(f"{row.largest[0]} → {row.largest[1]}")
    return cells


def _count(number: int) -> str:
    """A number of parameters, in millions or billions."""
    if number < 1e9:
        return f"{number / 1e6:.1f}M"
    return f"{number / 1e9:.2f}B"
