"""gradsight memory: a training step's peak, what checkpointing saves, and if gradients stay."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from gradsight.cli.memory_predict import (
    COMPARED,
    NO_POLICY,
    Question,
    TrainingOptions,
    answer,
    ask,
    refuse_unknown_batches,
)
from gradsight.cli.memory_predictions import (
    as_object,
    show_assumed,
    show_hanging,
    show_lines,
    show_predictions,
)
from gradsight.cli.memory_step import StepOptions
from gradsight.core.rundir import make_run_dir
from gradsight.errors import GradsightError, UsageError
from gradsight.memory.policy import refuse_nonsense
from gradsight.show.text import json_text
from gradsight.store.tracker import MetricsTracker
from gradsight.values.memory import CheckpointingPlan, CheckpointingReport
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
POLICIES = "full, selective, first:K, or a plan such as full:0-5,selective:6-9."
Policy = Annotated[str, Parameter(help=POLICIES)]

DEFAULT = StepOptions()
Place = Annotated[
    str | None,
    Parameter(
        help="A file and its function that returns (model, batch) or (model, batch, loss_fn)."
    ),
]


Model = Annotated[
    str | None,
    Parameter(
        help="A Hugging Face configuration (its folder, its file, or a name in the local cache; "
        "nothing is downloaded), or a file and its function that returns (model, batch) or "
        "(model, batch, loss_fn)."
    ),
]
TRAINING = TrainingOptions()


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
    if run_dir is not None:
        make_run_dir(run_dir)  # a place that cannot be written is refused before the step is run
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
            tracker.log_scalars(report.scalars() | report.kind_scalars(), step=0)
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
def predict_command(
    model: Model = None,
    /,
    *,
    policy: Annotated[str | None, Parameter(help=f"none, {POLICIES}")] = None,
    memory: Annotated[
        str | None,
        Parameter(
            help="Also find the largest batch and the cheapest plan that fit, for example 24GB.",
            allow_leading_hyphen=True,
        ),
    ] = None,
    json: Annotated[bool, Parameter(help="Print one object of JSON.", negative="")] = False,
    training: TrainingOptions = TRAINING,
    step: StepOptions = DEFAULT,
) -> int:
    """Predict a step's peak on each device, by kind: nothing is computed, no GPU is needed.

    Without a model, the table of the built-in ones, plain and checkpointed.
    """
    if policy is not None:
        refuse_nonsense(policy)
    limit = None if memory is None else parse_size(memory)
    names: list[str | None] = [step.architecture]
    detailed = model is not None or step.architecture is not None
    if not detailed:
        names = list(SHOWN)
        if json:
            raise UsageError("--json prints one prediction: name a model, or --architecture")
    policies = list(dict.fromkeys([NO_POLICY, policy or COMPARED]))
    if json:
        policies = [policy or NO_POLICY]
    # What a build function prints goes where progress goes: stdout is for the answer alone.
    with redirect_stdout(sys.stderr):
        questions = [ask(model, step, training, name) for name in names]
        asked = [replace(each, policy=policies[-1], limit=limit) for each in questions]
        refuse_unknown_batches(asked)
        with progress() as tell:
            answers = [answer(question, policies, tell) for question in asked]
    if json:
        print(json_text(as_object(answers[0])))
    else:
        show_predictions(Console(), answers, detailed=detailed)
    return 0


@app.command(name="plan")
def plan_command(
    model: Model = None,
    /,
    *,
    budget: Budget,
    training: TrainingOptions = TRAINING,
    step: StepOptions = DEFAULT,
) -> int:
    """Choose what every block recomputes so that the step fits the budget at the least extra work.

    Exits 2 with the smallest reachable peak where nothing fits.
    """
    limit = parse_size(budget)  # a wrong size is refused before the model is built
    question = ask(model, step, training)
    from gradsight.memory.plan import OverBudget, plan_step
    from gradsight.memory.predict import model_facts
    from gradsight.memory.progress import heard_by

    console = Console()
    facts = model_facts(question.build())
    shape = question.choice
    batch = f", batch {shape.batch_size} x {shape.block_size} tokens" if shape.batch_size else ""
    console.print()
    show_lines(console, ("Model:", f"{escape(shape.title)}{batch}"))
    show_assumed(console, question, facts)
    try:
        with progress() as tell, heard_by(tell):
            tell(f"Planning {question.choice.title} for {budget}")
            chosen = plan_step(question.build(), limit, question.setting(COMPARED))
    except OverBudget as error:
        if question.choice.sized is None:
            raise  # it makes its own batch
        raise say_what_fits(question, error) from error
    show_plan(console, chosen, step.block_names)
    return 0


def say_what_fits(question: Question, error: "OverBudget") -> GradsightError:
    """Return the refusal with the largest batch that would fit."""
    from gradsight.memory.predict import largest_batch

    smallest = error.smallest
    setting = question.setting(smallest.policy)
    with progress() as tell:
        tell("Looking for a batch that fits")
        size = largest_batch(
            question.build,
            smallest.budget_bytes,
            policy=setting.policy,
            optimizer=setting.optimizer,
            device=setting.device,
            ranks=setting.ranks,
        )
    if size:
        return GradsightError(f"{error.fact}. --batch_size {size} would fit with this policy")
    return GradsightError(
        f"{error.fact}. Not even --batch_size 1 fits: take a shorter sequence (--block_size), a "
        "smaller type (--dtype bf16) or an optimizer with less state"
    )


def show_plan(console: Console, chosen: CheckpointingPlan, blocks: list[str] | None = None) -> None:
    """Print the plan, and the two lines of code that apply it."""
    from gradsight.memory.cuda import UNKNOWN, is_cuda

    console.print()
    span = f"{len(chosen.blocks)}, {chosen.blocks[0]} to {chosen.blocks[-1]}"
    show_lines(
        console,
        ("Budget:", format_size(chosen.budget_bytes)),
        ("Without checkpointing:", f"{format_size(chosen.baseline_bytes)} at the peak"),
        ("With this plan:", f"{format_size(chosen.predicted_bytes)} at the peak"),
        ("Extra operations:", extra_operations(chosen.extra_flops)),
        ("Blocks:", escape(span)),
        ("Plan:", escape(chosen.policy)),
    )
    console.print()
    if chosen.policy == NO_POLICY:
        indented(console, "The step fits without checkpointing: there is nothing to apply.")
    else:
        console.print("  Apply it with:\n", highlight=False)
        console.print(
            "    from gradsight import apply_checkpointing", style="cyan", highlight=False
        )
        named = f", blocks={blocks}" if blocks else ""
        line = f'    apply_checkpointing(model, "{chosen.policy}"{named})'
        console.print(line, style="cyan", highlight=False, soft_wrap=True, markup=False)
    if is_cuda(chosen.device):
        console.print()
        for note in UNKNOWN:
            show_hanging(console, "- ", f"[dim]{escape(note)}[/]")


@contextmanager
def working(console: Console, what: str) -> Iterator[None]:
    """A spinner on a terminal, one plain line elsewhere."""
    if console.is_terminal:
        with console.status(f"{escape(what)} ...", spinner="line"):
            yield
    else:
        console.print(f"{what} ...", markup=False, highlight=False, soft_wrap=True)
        yield


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """What is being done, on stderr: a spinner on a terminal, plain lines elsewhere."""
    console = Console(stderr=True)

    def plain_line(what: str) -> None:
        console.print(f"{what} ...", markup=False, highlight=False, soft_wrap=True)

    if not console.is_terminal:
        yield plain_line
        return
    with console.status("...", spinner="line") as status:
        yield lambda what: status.update(f"{escape(what)} ...")
