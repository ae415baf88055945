"""gradsight memory: a training step's peak, what checkpointing saves, and if gradients stay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from gradsight.cli.build_function import load_build
from gradsight.errors import GradsightError, UsageError
from gradsight.memory.policy import refuse_nonsense
from gradsight.store.tracker import MetricsTracker
from gradsight.train.models import architecture, training_step
from gradsight.values.memory import CheckpointingPlan, CheckpointingReport, MemoryUse
from gradsight.values.sizes import format_size, gigabytes, parse_size

if TYPE_CHECKING:
    from gradsight.memory.plan import OverBudget

app = App(
    name="memory",
    help="Activation checkpointing and memory: measured, predicted without a GPU, planned.",
    name_transform=lambda name: name,
    result_action="return_value",
)

FAILED = 2
SAME = "bit for bit the same (loss, gradients, buffers, RNG)"
SHOWN = ("char", "GPT2-Small", "GPT2-Medium")
VERIFIED = "char"
VERIFIED_BATCH = 2
"""What `verify` runs when nothing is named: seconds long, and with activations and weights in the
proportion of a usual run, so that the saving is a usual one."""

# A hyphen before a size is a wrong size, and not the next option.
Budget = Annotated[
    str,
    Parameter(help="What the step may take, for example 6GB or 512MiB.", allow_leading_hyphen=True),
]
Policy = Annotated[
    str, Parameter(help="full, selective, first:K, or a plan such as full:0-5,selective:6-9.")
]
Device = Annotated[
    Literal["cpu", "cuda"],
    Parameter(help="cuda: what CUDA's operators keep; no GPU is needed for that."),
]
Optimizer = Literal["adamw", "adam", "sgd", "adagrad", "rmsprop", "none"]


@Parameter(name="*", name_transform=lambda name: name)
@dataclass(frozen=True)
class StepOptions:
    """The training step in question."""

    architecture: str | None = None
    """A built-in model: char, GPT2-Small, GPT2-Medium or GPT2-Large, from Hugging Face's
    configuration.
    """
    batch_size: int | None = None
    """Samples in a batch of a built-in model."""
    block_size: int | None = None
    """Tokens in a sample of a built-in model."""
    dropout: float = 0.0
    """Dropout of a built-in model."""
    optimizer: Optimizer = "adamw"
    """The optimizer of the step; none: forward and backward only."""
    blocks: str | None = None
    """The modules that count as blocks, with commas between their names, where they are not found
    by themselves.
    """

    @property
    def block_names(self) -> list[str] | None:
        if self.blocks is None:
            return None
        return [name.strip() for name in self.blocks.split(",")]

    @property
    def optimizer_name(self) -> str | None:
        if self.optimizer == "none":
            return None
        return self.optimizer

    def build(self, place: str | None, architecture: str | None = None) -> Callable[[], Any]:
        """The build function of a file, or of a built-in model."""
        for option in ("batch_size", "block_size"):
            size = getattr(self, option)
            if size is not None and size < 1:
                raise UsageError(f"--{option} must be 1 or more, got {size}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"--dropout must be at least 0 and below 1, got {self.dropout}")
        name = architecture or self.architecture
        if (place is None) == (name is None):
            raise UsageError(
                "give either file.py:build or --architecture, for example --architecture GPT2-Small"
            )
        if place is not None:
            if self.batch_size or self.block_size:
                raise UsageError(
                    "--batch_size and --block_size are for --architecture; file.py:build makes its "
                    "own batch"
                )
            return load_build(place)
        assert name is not None
        return training_step(
            name, batch_size=self.batch_size, block_size=self.block_size, dropout=self.dropout
        )

    def title(self, place: str | None) -> str:
        """The step's name in the output."""
        if place is not None:
            return place
        assert self.architecture is not None
        batch, length = self.batch_shape(self.architecture)
        return f"{self.architecture}, batch {batch} x {length} tokens"

    def batch_shape(self, name: str) -> tuple[int, int]:
        """Samples and tokens in a batch of a built-in model."""
        shape = architecture(name)
        return self.batch_size or shape.batch_size, self.block_size or shape.block_size

    def sized(self, name: str, batch_size: int) -> Callable[[], Any]:
        """The build function of a built-in model with another batch size."""
        return training_step(
            name, batch_size=batch_size, block_size=self.block_size, dropout=self.dropout
        )


DEFAULT = StepOptions()
Place = Annotated[
    str | None,
    Parameter(
        help="A file and its function that returns (model, batch) or (model, batch, loss_fn)."
    ),
]


@app.command(name="verify")
def verify_step(
    build: Place = None,
    /,
    *,
    policy: Policy = "full",
    step: StepOptions = DEFAULT,
    run_dir: Annotated[Path | None, Parameter(name="--run_dir")] = None,
) -> int:
    """Run a step plain and checkpointed: both peaks, and whether gradients stay bit for bit.

    Without a model, the small built-in one. Exits 0 where memory went down and nothing else
    changed, else 2.

    Parameters
    ----------
    run_dir
        A run directory in whose record the result is kept.
    """
    refuse_nonsense(policy)
    if build is None and step.architecture is None:
        size = step.batch_size or VERIFIED_BATCH
        step = replace(step, architecture=VERIFIED, batch_size=size)
    made = step.build(build)
    # torch takes 1.6 s to import: neither --help nor a wrong option may wait for it.
    from gradsight.memory.verify import verify_checkpointing

    console = Console()
    with working(console, f"Verifying {step.title(build)}, policy {policy}"):
        report = verify_checkpointing(
            made, policy=policy, optimizer=step.optimizer_name, blocks=step.block_names
        )
    show_report(console, report)
    if run_dir is not None:
        with MetricsTracker(run_dir) as tracker:
            tracker.log_scalars(report.scalars(), step=0)
    if not report.passed:
        return FAILED
    return 0


def show_report(console: Console, report: CheckpointingReport) -> None:
    """Print what the saving costs and what it can be at most, both peaks, and the verdict."""
    saved = report.baseline_bytes - report.optimized_bytes
    same = SAME if report.gradients_identical else "[red]NOT the same[/]"
    # Told every time: on a model of 6.6B, weights and optimizer leave checkpointing only 14%.
    ceiling = f"{report.ceiling:.1%} of the baseline's peak are activations"
    console.print()
    show_lines(
        console,
        ("Ceiling:", ceiling),
        ("Extra operations:", extra_operations(report.extra_flops)),
        ("Gradients and state:", same),
    )
    console.print()
    console.print("RESULTS", style="bold")
    console.print(Rule(characters="=", style="dim"))
    console.print()
    show_lines(
        console,
        ("Baseline peak memory:", gigabytes(report.baseline_bytes)),
        ("Optimized peak memory:", gigabytes(report.optimized_bytes)),
        ("Memory reduction:", f"{gigabytes(saved)} ({report.reduction:.1%})"),
    )
    console.print()
    show_verdict(console, report)


def show_lines(console: Console, *lines: tuple[str, str]) -> None:
    """Names and values, one below the other."""
    for name, value in lines:
        console.print(f"  {name:<24} {value}", highlight=False)


def extra_operations(share: float) -> str:
    """What is recomputed; only matrix products are counted, which are nearly all of the time."""
    return f"{share:.1%} of matrix products (other work is not counted)"


def show_verdict(console: Console, report: CheckpointingReport) -> None:
    """Success or failure, and why."""
    if report.passed:
        indented(console, f"[green]✓ SUCCESS:[/] {report.remark}")
        console.print("\n[bold green]VERIFICATION PASSED ✓[/]")
        return
    reason = report.remark if report.gradients_identical else f"{report.first_difference}"
    indented(console, f"[red]✗ FAILED:[/] {escape(reason)}")
    if report.cause:
        console.print()
        indented(console, f"[bold]Likely cause:[/] {escape(report.cause)}")
    console.print("\n[bold red]VERIFICATION FAILED ✗[/]")


def indented(console: Console, text: str) -> None:
    """Text that keeps its indent when it wraps."""
    console.print(Padding(Text.from_markup(text), (0, 0, 0, 2), expand=False))


@app.command(name="predict")
def predict_step(
    build: Place = None,
    /,
    *,
    policy: Policy = "full",
    device: Device = "cpu",
    memory: Annotated[
        str | None,
        Parameter(
            help="Also find the largest batch that fits, for example 24GB.",
            allow_leading_hyphen=True,
        ),
    ] = None,
    step: StepOptions = DEFAULT,
) -> int:
    """Predict a step's peak with and without checkpointing: nothing is computed, no GPU is needed.

    Without a model, the table of the built-in ones. With --memory 24GB also the largest batch that
    fits.
    """
    refuse_nonsense(policy)
    limit = None if memory is None else parse_size(memory)
    if limit is not None and build is not None:
        raise UsageError(
            "--memory looks for a batch size, and file.py:build makes its own batch: "
            "use --architecture"
        )
    names: list[str | None] = [step.architecture]
    if build is None and not step.architecture:
        names = list(SHOWN)
    options = PredictionOptions(policy, device, limit, step)
    console = Console()
    rows = []
    for name in names:
        made = step.build(build, name)
        with working(console, f"Predicting {build or name}"):
            rows.append(predicted_row(options, made, name, title=build or str(name)))
    show_predictions(console, rows, options)
    return 0


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


@app.command(name="plan")
def plan_step(
    build: Place = None, /, *, budget: Budget, device: Device = "cpu", step: StepOptions = DEFAULT
) -> int:
    """Choose what every block recomputes so that the step fits the budget at the least extra work.

    Exits 2 with the smallest reachable peak where nothing fits.
    """
    parse_size(budget)  # a wrong size is refused before the model is built
    made = step.build(build)
    from gradsight.memory.plan import OverBudget, plan_checkpointing

    console = Console()
    try:
        with working(console, f"Planning {step.title(build)} for {budget}"):
            chosen = plan_checkpointing(
                made,
                budget,
                optimizer=step.optimizer_name,
                device=device,
                blocks=step.block_names,
            )
    except OverBudget as error:
        if build is not None:
            raise  # it makes its own batch
        raise say_what_fits(console, step, error) from error
    show_plan(console, chosen, step.block_names)
    return 0


def say_what_fits(console: Console, step: StepOptions, error: "OverBudget") -> GradsightError:
    """The refusal with the largest batch of a built-in model that would fit."""
    from gradsight.memory.predict import largest_batch

    smallest = error.smallest
    assert step.architecture is not None
    with working(console, "Looking for a batch that fits"):
        size = largest_batch(
            partial(step.sized, step.architecture),
            smallest.budget_bytes,
            policy=smallest.policy,
            optimizer=step.optimizer_name,
            device=smallest.device,
        )
    if size:
        return GradsightError(f"{error}: --batch_size {size} would fit, recomputed as above")
    return GradsightError(f"{error}: not even --batch_size 1 fits")


def show_plan(console: Console, chosen: CheckpointingPlan, blocks: list[str] | None = None) -> None:
    """Print the plan, and the two lines of code that apply it."""
    console.print()
    span = f"{len(chosen.blocks)}, {chosen.blocks[0]} to {chosen.blocks[-1]}"
    show_lines(
        console,
        ("Budget:", gigabytes(chosen.budget_bytes)),
        ("Without checkpointing:", gigabytes(chosen.baseline_bytes)),
        ("With this plan:", f"{gigabytes(chosen.predicted_bytes)} predicted for {chosen.device}"),
        ("Extra operations:", extra_operations(chosen.extra_flops)),
        ("Blocks:", escape(span)),
        ("Plan:", escape(chosen.policy)),
    )
    console.print("\n  Apply it with:\n", highlight=False)
    console.print("    from gradsight import apply_checkpointing", style="cyan", highlight=False)
    named = f", blocks={blocks}" if blocks else ""
    line = f'    apply_checkpointing(model, "{chosen.policy}"{named})'
    console.print(line, style="cyan", highlight=False, soft_wrap=True, markup=False)


@contextmanager
def working(console: Console, what: str) -> Iterator[None]:
    """A spinner on a terminal, one plain line elsewhere."""
    if console.is_terminal:
        with console.status(f"{escape(what)} ...", spinner="line"):
            yield
    else:
        console.print(f"{what} ...", markup=False, highlight=False, soft_wrap=True)
        yield
