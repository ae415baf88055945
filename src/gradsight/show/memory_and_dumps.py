"""What report.md and the terminal say of memory and of the dumped gradients. No torch."""

from collections.abc import Sequence

from gradsight.values.dumps import DumpMetadata
from gradsight.values.plain import listed
from gradsight.values.sizes import format_size
from gradsight.values.steps import Scalar
from gradsight.values.texts import for_markdown

_MOST_DUMPS = 12
_MONITORED = {
    "memory/gpu_allocated_gb": "GPU, allocated",
    "memory/gpu_reserved_gb": "GPU, reserved",
    "memory/gpu_max_allocated_gb": "GPU, largest so far",
    "memory/rss_gb": "process, resident",
    "memory/peak_rss_gb": "process, largest so far",
    "memory/tensor_gb": "tensors",
}


def memory_section(memory: Sequence[Scalar]) -> list[str]:
    """What one step takes, predicted and measured, and what was seen while training."""
    rows = _one_step(memory)
    for name, label in _MONITORED.items():
        seen = [scalar for scalar in memory if scalar.name == name]
        if seen:
            largest = max(seen, key=lambda scalar: scalar.value)
            text = f"{_size(seen[0])} → {_size(seen[-1])}"
            if largest.value > max(seen[0].value, seen[-1].value):
                text += f", at most {_size(largest)} (step {largest.step})"
            rows.append((f"Monitored: {label}", text))
    if not rows:
        return []
    lines = ["## Memory", "", "| What | How much |", "| --- | --- |"]
    return lines + [f"| {name} | {value} |" for name, value in rows]


def memory_line(memory: Sequence[Scalar]) -> str | None:
    """What one step takes, in one line; None where nobody looked."""
    last = {scalar.name: scalar for scalar in memory}
    parts = []
    if "memory/predicted_peak_gb" in last:
        parts.append(f"predicted {_size(last['memory/predicted_peak_gb'])}")
    if "checkpointing/baseline_gb" in last:
        plain = _size(last["checkpointing/baseline_gb"])
        optimized = _size(last["checkpointing/optimized_gb"])
        parts.append(f"measured {plain} plain, {optimized} checkpointed")
    if not parts:
        return None
    return f"memory of one step: {'; '.join(parts)}"


def _one_step(memory: Sequence[Scalar]) -> list[tuple[str, str]]:
    last = {scalar.name: scalar for scalar in memory}
    rows = []
    if "memory/predicted_peak_gb" in last:
        rows.append(("One step, predicted", _size(last["memory/predicted_peak_gb"])))
    if "checkpointing/baseline_gb" in last:
        plain = _size(last["checkpointing/baseline_gb"])
        saved = last["checkpointing/reduction"].value
        same = "gradients bit for bit the same"
        if not last["checkpointing/gradients_identical"].value:
            same = "**gradients differ**"
        optimized = _size(last["checkpointing/optimized_gb"])
        text = f"{plain} plain, {optimized} with activation checkpointing"
        rows.append(("One step, measured", f"{text} ({saved:.0%} saved, {same})"))
    return rows


def _size(scalar: Scalar) -> str:
    return format_size(scalar.value * 1e9)


def dumps_section(dumps: Sequence[DumpMetadata]) -> list[str]:
    """Which gradients are on the disk, and why."""
    if not dumps:
        return []
    total = format_size(sum(dump.bytes for dump in dumps))
    lines = [
        "## Dumped gradients",
        "",
        "| Step | Kind | Size | Why | Gradient |",
        "| ---: | --- | ---: | --- | --- |",
    ]
    shown = _most_telling(dumps)
    for dump in shown:
        cells = [str(dump.step), dump.kind, format_size(dump.bytes), dump.reason, dump.gradient]
        lines.append(f"| {' | '.join(for_markdown(cell) for cell in cells)} |")
    what = f"{len(dumps)} in all, {total}"
    if len(shown) < len(dumps):
        what += f"; {len(dumps) - len(shown)} of the schedule's are not listed here"
    return [*lines, "", f"{what}. `gradsight dump show` looks into them."]


def dumps_line(dumps: Sequence[DumpMetadata]) -> str | None:
    """The same in one line; None without dumps."""
    if not dumps:
        return None
    steps = [_step_and_why(dump) for dump in dumps]
    return f"dumped: {listed(steps, _MOST_DUMPS // 2)}"


def _step_and_why(dump: DumpMetadata) -> str:
    if dump.reason == "schedule":
        return f"step {dump.step}"
    return f"step {dump.step} ({dump.reason})"


def _most_telling(dumps: Sequence[DumpMetadata]) -> list[DumpMetadata]:
    """Those that a page has room for: findings first, then the newest; in the order of steps."""
    ranked = sorted(dumps, key=lambda dump: (dump.reason == "schedule", -dump.step))
    return sorted(ranked[:_MOST_DUMPS], key=lambda dump: (dump.step, dump.kind))
