"""What `gradsight memory predict` prints: a line for each model, its peak by kind, what fits."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gradsight.cli.memory_predict import NO_POLICY, Answer, Question
from gradsight.values.sizes import format_size

if TYPE_CHECKING:
    from gradsight.memory.predict import ModelFacts


def as_object(answer: Answer) -> dict[str, Any]:
    """The prediction for --json: the peak of the fullest device under the policy."""
    question = answer.question
    use = answer.asked
    shape = question.choice
    values = {
        "model": shape.title,
        "parameters": answer.model.parameters,
        "trainable_parameters": answer.model.trainable,
        "device": question.device,
        "gpus": question.ranks.count,
        "parallel": question.ranks.parallel,
        "batch_size": shape.batch_size,
        "block_size": shape.block_size,
        "dtype": answer.model.dtype,
        "lora": question.training.lora,
        "optimizer": question.step.optimizer,
        "policy": question.policy,
        "peak_bytes": use.peak_bytes,
        "by_kind": dict(use.by_kind),
        "assumptions": use.assumptions,
        "bounds": use.bounds,
        "notes": use.notes,
    }
    if question.limit is not None:
        values["memory_bytes"] = question.limit
        values["largest_batch_size"] = answer.largest[question.policy]
        values["plan"] = _plan_object(answer)
    return values


def _plan_object(answer: Answer) -> dict[str, Any]:
    """The cheapest plan; where none fits, its policy is null and the smallest peak is given."""
    plan = answer.plan or answer.smallest
    if plan is None:
        return {"policy": None, "peak_bytes": None, "extra_flops": None}
    return {
        "policy": None if answer.plan is None else plan.policy,
        "peak_bytes": plan.predicted_bytes,
        "extra_flops": plan.extra_flops,
    }


def show_predictions(console: Console, answers: list[Answer], *, detailed: bool) -> None:
    """Print a line for each model, of a single one also its kinds, and what is not known."""
    question = answers[0].question
    console.print()
    show_assumed(console, question, answers[0].model)
    console.print()
    console.print(_summary(answers))
    console.print(f"\n[dim]{escape(_legend(question))}[/]", highlight=False)
    for answer in answers:
        if detailed:
            console.print()
            console.print(_kinds(answer))
            console.print()
        for line in [*_what_fits(answer), *_assumptions(answer)]:
            show_hanging(console, "- ", escape(line))
    uses = [use for answer in answers for use in answer.uses.values()]
    for note in dict.fromkeys(note for use in uses for note in use.notes):
        show_hanging(console, "- ", f"[dim]{escape(note)}[/]")


def show_assumed(console: Console, question: Question, model: "ModelFacts") -> None:
    """Print what an answer assumes, and how to change what the command line does not say."""
    precision = model.dtype
    if question.training.dtype is None:
        other = "fp32" if precision == "bf16" else "bf16"
        precision += f", {question.choice.type_origin} (change: --dtype {other})"
    device = question.device
    if question.training.device is None:
        device += ", the default (change: --device cuda)"
    if question.ranks.parallel is not None:
        device += f", each of {question.ranks.count} under {question.ranks.parallel}"
    lines = [("Precision:", precision), ("Device:", device)]
    if question.lora is not None:
        base, adapters = _count(model.parameters - model.trainable), _count(model.trainable)
        lines.append(("LoRA:", f"{base} frozen, {adapters} trained in {question.lora.dtype}"))
    lines.append(("Optimizer:", question.step.optimizer))
    show_lines(console, *lines)


def show_lines(console: Console, *lines: tuple[str, str]) -> None:
    """Print names and values, one below the other."""
    for name, value in lines:
        show_hanging(console, f"  {name:<24} ", value)


def show_hanging(console: Console, start: str, text: str) -> None:
    """Print text of which further lines stand below the first one, and not below its start."""
    for line in Text.from_markup(text).wrap(console, max(20, console.width - len(start))):
        line.rstrip()
        console.print(Text.assemble(start, line), highlight=False)
        start = " " * len(start)


def _summary(answers: list[Answer]) -> Table:
    table = _table("model")
    for name in ("params", "batch", "plain", "checkpointed", "saved", "ceiling"):
        table.add_column(name, justify="right")
    if answers[0].question.limit is not None:
        table.add_column("largest batch", justify="right")
    for answer in answers:
        table.add_row(*_cells(answer))
    return table


def _table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    return table


def _cells(answer: Answer) -> list[str]:
    """A model's texts, column by column."""
    shape = answer.question.choice
    plain = answer.uses[NO_POLICY]
    checkpointed = list(answer.uses.values())[-1]
    batch = f"{shape.batch_size}x{shape.block_size}" if shape.batch_size else ""
    cells = [
        shape.title,
        _count(answer.model.parameters),
        batch,
        format_size(plain.peak_bytes),
        format_size(checkpointed.peak_bytes),
        f"{1 - checkpointed.peak_bytes / plain.peak_bytes:.1%}",
        f"{plain.activation_share:.1%}",
    ]
    if answer.largest:
        sizes = list(answer.largest.values())
        cells.append(f"{sizes[0]} → {sizes[-1]}")
    return cells


def _legend(question: Question) -> str:
    """Explain the columns of the summary."""
    text = "Ceiling: activations' share of the plain peak."
    if question.limit is not None:
        fits = format_size(question.limit)
        text += f" Largest batch: that fits {fits}, plain and checkpointed."
    return text


def _kinds(answer: Answer) -> Table:
    """The peak under each policy by kind."""
    table = _table("peak by kind")
    for policy in answer.uses:
        table.add_column("plain" if policy == NO_POLICY else policy, justify="right")
    uses = list(answer.uses.values())
    for kind in uses[0].by_kind:
        if any(use.by_kind[kind] for use in uses):
            table.add_row(kind, *(format_size(use.by_kind[kind]) for use in uses))
    table.add_row("total", *(format_size(use.peak_bytes) for use in uses), style="bold")
    return table


def _what_fits(answer: Answer) -> list[str]:
    """Return whether the step fits and at which cost, and why checkpointing may not help."""
    lines = []
    limit = answer.question.limit
    if answer.plan is not None and limit is not None:
        fits = f"This batch fits {format_size(limit)}"
        peak = format_size(answer.plan.predicted_bytes)
        if answer.plan.policy == NO_POLICY:
            lines.append(f"{fits} without checkpointing: peak {peak}")
        else:
            lines.append(
                f"{fits} with checkpointing {answer.plan.policy}: peak {peak}, "
                f"{answer.plan.extra_flops:.1%} more matrix products"
            )
    elif answer.smallest is not None and limit is not None:
        lines.append(
            f"This batch does not fit {format_size(limit)}: the smallest peak is "
            f"{format_size(answer.smallest.predicted_bytes)}, with checkpointing "
            f"{answer.smallest.policy}"
        )
    uses = list(answer.uses.values())
    if len(uses) > 1 and uses[0].peak_bytes == uses[-1].peak_bytes:
        lines.append(
            "Checkpointing does not lower this peak: it is not made of activations, but of "
            "parameters, gradients and the optimizer"
        )
    return lines


def _assumptions(answer: Answer) -> list[str]:
    """What was assumed about values, and how much it matters."""
    lines = []
    for policy, use in answer.uses.items():
        if not use.assumptions:
            continue
        text = f"Assumed (policy {policy}): {'; '.join(use.assumptions)}"
        if use.bounds is not None:
            least, most = use.bounds
            text += (
                f"; with an even load or almost all tokens at one expert, the peak ranges from "
                f"{format_size(least)} to {format_size(most)}"
            )
        lines.append(text)
    return lines


def _count(number: int) -> str:
    """A number of parameters, in millions or billions."""
    if number < 1e9:
        return f"{number / 1e6:.1f}M"
    return f"{number / 1e9:.2f}B"
