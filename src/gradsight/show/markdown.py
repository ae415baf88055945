"""report.md: what a run's gradients did, for someone who has one minute. No torch."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsight.show.experts import expert_table
from gradsight.show.figures import bar, figure, sparkline
from gradsight.show.memory_and_dumps import dumps_section, memory_section
from gradsight.show.run_statistics import BlockNorms
from gradsight.show.samples import TextOf, markdown_section
from gradsight.show.summary import Summary
from gradsight.values.findings import Problem
from gradsight.values.health_report import SIGNS, markdown_sections
from gradsight.values.histograms import Histogram
from gradsight.values.plain import listed, quoted
from gradsight.values.steps import Step
from gradsight.values.texts import for_markdown, in_code
from gradsight.values.wording import markdown_lines

_MOST_ROWS = 40
_MOST_STEPS = 8
_MOST_NAMES = 3
_MOST_LISTED = 200
"""Incidents, or problems, of which a page tells."""
_LABEL = 16
"""Columns of a histogram's labels."""
_LEAST_SHARE = 0.0005
"""Bins with a smaller share of the entries are not drawn."""
_WITHIN = "gradients/share_within_0.1"


def no_text(sample_id: str) -> str | None:
    """The text of a sample where nothing is known of any."""
    return None


def report_text(summary: Summary, text_of: TextOf = no_text) -> str:
    """The whole report as markdown; text_of gives the samples' text, where it is known."""
    title = ["# Gradsight report"]
    if summary.failure is not None:
        title += ["", f"**{SIGNS['critical']} {for_markdown(summary.failure)}**"]
    sections = [[*title, "", f"**{for_markdown(summary.verdict)}**"], _overview(summary)]
    sections.append(_norm_chart(summary))
    if summary.steps and summary.is_judged:
        sections += markdown_sections(summary.health)
    sections += [_block_table(summary), expert_table(summary.experts)]
    if summary.samples is not None:
        sections.append(markdown_section(summary.samples, text_of))
    sections += [
        memory_section(summary.memory),
        dumps_section(summary.dumps),
        _histogram(summary.histogram),
        _broken(summary),
        _incidents(summary),
        _problems(summary.problems),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _overview(summary: Summary) -> list[str]:
    if not summary.steps:
        return []
    lines = ["| What | In this run |", "| --- | --- |"]
    return lines + [f"| {name} | {value} |" for name, value in _overview_rows(summary)]


def _norm_chart(summary: Summary) -> list[str]:
    """The picture that lies beside the report, where there is one."""
    if all(step.total_norm is None for step in summary.steps):
        return []
    return ["![The gradient's norm over training, and what was found](norms.svg)"]


def _overview_rows(summary: Summary) -> list[tuple[str, str]]:
    """The overview's names and values, line by line."""
    steps = summary.steps
    clipped = sum(step.clip_coef is not None and step.clip_coef < 1 for step in steps)
    rows = [
        ("Steps", f"{steps[0].step} to {steps[-1].step}"),
        ("Loss", _from_to(step.loss for step in steps)),
        ("Total gradient norm", _norm_over_time(steps)),
        ("Learning rate", _from_to(step.lr for step in steps)),
        ("Steps with clipping", f"{clipped} of {len(steps)}"),
    ]
    for who, count in Counter(step.left_out_by for step in steps if step.skipped).items():
        rows.append((f"Steps left out by {who}", str(count)))
    within = [step.scalars[_WITHIN] for step in steps if _WITHIN in step.scalars]
    if within:
        rows.append(("Entries within ±0.1", f"{within[-1]:.1%} at the last measured step"))
    parameters = summary.config.get("parameters", [])
    frozen = sum(not parameter.get("trainable", True) for parameter in parameters)
    if frozen:
        rows.append(("Frozen parameters", f"{frozen} of {len(parameters)}"))
    rows.append(("Measured on", _measured_on(steps, summary.config)))
    return rows


def _norm_over_time(steps: list[Step]) -> str:
    norms = [step.total_norm for step in steps if step.total_norm is not None]
    if not norms:
        return "–"
    return f"{_from_to(norms)} `{sparkline(norms)}`"


def _measured_on(steps: list[Step], config: dict[str, Any]) -> str:
    other = [step for step in steps if step.gradient != "true"]
    text = f"the gradient {config.get('gradient', '')}".strip()
    if other:
        kinds = sorted({step.gradient for step in other})
        text += f"; but on {len(other)} steps: {listed(kinds, _MOST_STEPS)}"
    return for_markdown(text)


def _from_to(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return f"{figure(known[0])} → {figure(known[-1])}"


def _block_table(summary: Summary) -> list[str]:
    if not summary.blocks:
        return []
    lines = [
        "## Gradient norms by block",
        "",
        "| block | first | median | last | largest | update/weight | weight RMS | over time |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    shown = list(summary.blocks.items())[:_MOST_ROWS]
    lines += [_block_row(name, block) for name, block in shown]
    if len(summary.blocks) > len(shown):
        lines.append(f"\n{len(summary.blocks) - len(shown)} more blocks are in the record.")
    return lines


def _block_row(name: str, block: BlockNorms) -> str:
    norms = block.norms
    finite = norms[np.isfinite(norms)]
    cells = [
        f"`{in_code(name)}`",
        figure(norms[0]),
        _middle(finite),
        figure(norms[-1]),
        figure(block.largest),
        _middle(block.ratios),
        _from_to(block.weights),
        f"`{sparkline(norms)}`",
    ]
    return f"| {' | '.join(cells)} |"


def _middle(values: Sequence[float] | npt.NDArray[np.float64]) -> str:
    return figure(float(np.median(values)) if len(values) else None)


def _histogram(histogram: Histogram | None) -> list[str]:
    """Magnitudes by power of ten would hide the shape; powers of two in pairs fit a page."""
    if histogram is None:
        return []
    lines = [f"## All gradient entries at step {histogram.step}", "", _counted(histogram)]
    total = sum(histogram.positive) + sum(histogram.negative) + histogram.zero + histogram.underflow
    if not histogram.positive or not total:
        return [*lines, "every entry is zero or not finite"]
    magnitudes = [
        negative + positive
        for negative, positive in zip(histogram.negative, histogram.positive, strict=True)
    ]
    pairs = range(0, len(magnitudes), 2)
    shares = [sum(magnitudes[start : start + 2]) / total for start in pairs]
    zero = (histogram.zero + histogram.underflow) / total
    top = max(shares)
    lines += ["", "```", f"{'magnitude':>{_LABEL}}  share"]
    for start, share in zip(pairs, shares, strict=True):
        if share >= _LEAST_SHARE:
            least = 2.0 ** (histogram.low + start)
            label = f"{least:.1g} to {4 * least:.1g}"
            lines.append(f"{label:>{_LABEL}}  {share:6.1%} {bar(share / top)}")
    lines.append(f"{'zero':>{_LABEL}}  {zero:6.1%} {bar(min(1.0, zero / top))}")
    return [*lines, "```"]


def _counted(histogram: Histogram) -> str:
    """Which entries were counted, and how sure the shares are."""
    if not histogram.error:
        return f"all {histogram.size:,} counted"
    entries = f"{histogram.sampled:,} of {histogram.size:,}"
    return f"sampled: {entries}, standard error of a share at most {histogram.error:.2%}"


def _broken(summary: Summary) -> list[str]:
    if not summary.broken:
        return []
    lines = ["## Steps whose gradient is not finite", ""]
    skipped = {step.step: step.left_out_by for step in summary.steps if step.skipped}
    for step, names in list(summary.broken.items())[:_MOST_STEPS]:
        note = f" (left out by {skipped[step]})" if step in skipped else ""
        lines.append(f"- step {step}{note}: {listed(quoted(names), _MOST_NAMES)}")
    if len(summary.broken) > _MOST_STEPS:
        lines.append(f"- and {len(summary.broken) - _MOST_STEPS} more steps")
    return lines


def _incidents(summary: Summary) -> list[str]:
    """The flight recorder's bundles; what a finding has said already is not said again."""
    if not summary.incidents:
        return []
    lines = ["## Incidents", ""]
    said = {finding.incident for finding in summary.health.findings}
    for incident in summary.incidents[:_MOST_LISTED]:
        place = f"incidents/step{incident.step}-{incident.code}"
        again = "; `gradsight replay` can run it again" if incident.replayable else ""
        what = for_markdown(f"{incident.code}: {incident.damage or incident.reason}")
        lines.append(f"- step {incident.step}, {what} (`{in_code(place)}`{again})")
        if incident.diagnosis is not None and place not in said:
            lines += [f"    - {line}" for line in markdown_lines(incident.diagnosis)]
    return lines + _more(len(summary.incidents))


def _problems(problems: list[Problem]) -> list[str]:
    if not problems:
        return []
    lines = ["## What Gradsight could not do", ""]
    for problem in problems[:_MOST_LISTED]:
        since = f"from step {problem.first_step}, {problem.count}x"
        lines.append(f"- {for_markdown(problem.message)} ({since})")
    return lines + _more(len(problems))


def _more(count: int) -> list[str]:
    if count <= _MOST_LISTED:
        return []
    return [f"- and {count - _MOST_LISTED} more"]
