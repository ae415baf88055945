"""norms.svg: the gradient's norm over training, with what was found where it began. No torch."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median
from xml.etree import ElementTree

from gradsight.show.drawing import (
    Area,
    Point,
    curves,
    element,
    logarithmic_range,
    logarithmic_ticks,
    path_data,
    safe,
    step_ticks,
)
from gradsight.show.figures import figure
from gradsight.show.summary import Summary
from gradsight.values.findings import Finding
from gradsight.values.plain import counted, listed
from gradsight.values.steps import Step

_WIDTH = 900.0
_LEFT = 62.0
_RIGHT = 118.0
_TITLE = 44.0
_LANE = 15.0
_HEIGHT = 270.0
_AXIS = 46.0
_LINE = 17.0
_SIGN = 6.4
"""Pixels of a sign of small text, a little more than any font's mean."""
_MOST_LISTED = 10
_LIMITS = {
    1000.0: ("> 1000: critical", "critical"),
    100.0: ("> 100: warning", "warning"),
    0.001: ("< 0.001: warning", "warning"),
}
"""The limits that GS102, GS101 and GS105 have unless they are set otherwise."""
_HEALTHY = (0.1, 10.0)

_STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Arial, sans-serif; fill: #30343b }
.title { font-size: 15px; font-weight: 600 }
.small { font-size: 11px; fill: #626973 }
.paper { fill: #ffffff }
.grid { stroke: #e3e6ea; fill: none }
.band { fill: #2ea043; fill-opacity: .1 }
.curve { stroke: #1f6feb; stroke-width: 1.4; fill: none }
.curve { stroke-linejoin: round; stroke-linecap: round }
.clip { stroke: #8250df; stroke-width: 1.2; stroke-dasharray: 6 3; fill: none }
.limit { stroke-dasharray: 2 3; fill: none }
.mark { stroke-width: 1.4; fill: none }
.warning { stroke: #b26a00 } text.warning { stroke: none; fill: #9a5b00; font-weight: 600 }
.critical { stroke: #c62828 } text.critical { stroke: none; fill: #c62828; font-weight: 600 }
text.note { font-weight: 400 }
.skipped { stroke: #8b929c }
.cliptext { fill: #7440cf; stroke: #ffffff; stroke-width: 3px; paint-order: stroke }
@media (prefers-color-scheme: dark) {
text { fill: #d8dce2 } .small { fill: #9aa2ad } .paper { fill: #15181d } .grid { stroke: #2b3038 }
.band { fill-opacity: .16 } .curve { stroke: #6cb0ff }
.clip { stroke: #c9a6ff } .cliptext { fill: #c9a6ff; stroke: #15181d }
.warning { stroke: #f0b429 } text.warning { fill: #f0b429 }
.critical { stroke: #ff7b72 } text.critical { fill: #ff7b72 }
}
"""


@dataclass(frozen=True)
class _Label:
    """The codes that were first found at one step, and the row above the plot they stand in."""

    findings: tuple[Finding, ...]
    text: str
    x: float
    begins: float
    lane: int


def norm_chart(summary: Summary) -> str | None:
    """The picture as SVG; None where no gradient was measured."""
    steps = [step for step in summary.steps if step.total_norm is not None]
    if not steps:
        return None
    area = _area(steps, summary.health.findings)
    labels = _labels(summary.health.findings, area)
    notes = _notes(summary, steps)
    lanes = 1 + max((label.lane for label in labels), default=-1)
    # The rows of labels are known only now: they push the plot down.
    area = replace(area, top=_TITLE + _LANE * lanes)
    height = area.bottom + _AXIS + _LINE * len(notes)
    picture = _picture(height, f"Gradient norm over training: {summary.verdict}")
    element(picture, "text", "Gradient Norm Over Training", class_="title", x=_LEFT, y=24)
    _draw_axes(picture, area)
    # Behind the curve: a spike must not vanish under the line that points at it.
    for label in labels:
        _draw_label(picture, area, label)
    _draw_curves(picture, area, steps)
    _draw_broken(picture, area, steps)
    for row, (text, kind) in enumerate(notes):
        y = area.bottom + _AXIS + _LINE * row
        element(picture, "text", text, class_=f"note {kind}", x=_LEFT, y=y)
    return ElementTree.tostring(picture, encoding="unicode") + "\n"


def _picture(height: float, about: str) -> ElementTree.Element:
    """An empty picture with its own paper: it is read on light pages and on dark ones."""
    size = {"width": f"{_WIDTH:g}", "height": f"{height:g}"}
    space = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {_WIDTH:g} {height:g}"}
    picture = ElementTree.Element("svg", {**space, **size, "role": "img"})
    element(picture, "title", about)
    element(picture, "style", _STYLE)
    element(picture, "rect", class_="paper", width="100%", height="100%")
    return picture


def _area(steps: Sequence[Step], findings: Iterable[Finding]) -> Area:
    """The plot's place and edges: every step and every norm, before and after clipping."""
    low, high = logarithmic_range(
        value for step in steps for _, value in (_before(step), _after(step))
    )
    numbers = [steps[0].step, steps[-1].step, *(finding.first_step for finding in findings)]
    width = _WIDTH - _LEFT - _RIGHT
    return Area(_LEFT, _TITLE, width, _HEIGHT, min(numbers), max(numbers), low, high)


def _before(step: Step) -> Point:
    """The norm of a step's gradient."""
    if step.total_norm is None:
        return step.step, math.nan
    return step.step, step.total_norm


def _after(step: Step) -> Point:
    """The norm that the optimizer was given; NaN where it is the gradient's own."""
    number, norm = _before(step)
    if step.clip_coef is None or step.clip_coef >= 1:
        return number, math.nan
    return number, norm * step.clip_coef


def _draw_axes(picture: ElementTree.Element, area: Area) -> None:
    """Grid and numbers, the healthy range, and the limits that are in sight."""
    edges = [min(max(math.log10(value), area.low), area.high) for value in _HEALTHY]
    if edges[1] > edges[0]:
        top, bottom = area.y(10 ** edges[1]), area.y(10 ** edges[0])
        place = {"x": area.left, "y": top, "width": area.width, "height": bottom - top}
        element(picture, "rect", class_="band", **place)
        middle = (top + bottom) / 2 + 4
        element(picture, "text", "0.1 to 10: healthy", class_="small", x=area.right + 6, y=middle)
    for value in logarithmic_ticks(area.low, area.high):
        y = area.y(value)
        element(picture, "path", class_="grid", d=f"M{area.left:g} {y:.1f}H{area.right:g}")
        text = {"text_anchor": "end", "x": area.left - 6, "y": y + 4}
        element(picture, "text", _power(value), class_="small", **text)
    for step in step_ticks(area.first, area.last):
        x = area.x(step)
        element(picture, "path", class_="grid", d=f"M{x:.1f} {area.bottom:g}v5")
        text = {"text_anchor": "middle", "x": x, "y": area.bottom + 17}
        element(picture, "text", f"{step:,}", class_="small", **text)
    for value, (name, severity) in _LIMITS.items():
        if area.holds(value):
            y = area.y(value)
            line = f"M{area.left:g} {y:.1f}H{area.right:g}"
            element(picture, "path", class_=f"limit {severity}", d=line)
            element(picture, "text", name, class_="small", x=area.right + 6, y=y + 4)
    frame = {"x": area.left, "y": area.top, "width": area.width, "height": area.height}
    element(picture, "rect", class_="grid", **frame)
    x, y = area.left + area.width / 2, area.bottom + 30
    element(picture, "text", "Step", class_="small", text_anchor="middle", x=x, y=y)
    turned = f"translate(14 {area.top + area.height / 2:g}) rotate(-90)"
    about = {"text_anchor": "middle", "transform": turned}
    element(picture, "text", "Gradient Norm", class_="small", **about)


def _power(value: float) -> str:
    """A power of ten, short enough to stand beside the axis."""
    if 1e-4 <= value <= 1e4:
        return f"{value:g}"
    return f"1e{math.log10(value):.0f}"


def _draw_curves(picture: ElementTree.Element, area: Area, steps: Sequence[Step]) -> None:
    """The norm, and what clipping leaves of it: a line where that is always the same."""
    norms = path_data(curves(map(_before, steps), area))
    element(picture, "path", class_="curve", d=norms)
    clipped = [point for point in map(_after, steps) if math.isfinite(point[1]) and point[1] > 0]
    if not clipped:
        return
    level = median(value for _, value in clipped)
    if _is_one_level(clipped, level):
        y = area.y(level)
        line = f"M{area.left:g} {y:.1f}H{area.right:g}"
        text = f"clipped to {figure(level)}"
    else:
        y = area.y(clipped[-1][1])
        line = path_data(curves(clipped, area))
        text = "after clipping"
    element(picture, "path", class_="clip", d=line)
    place = {"x": area.right - 4, "y": y - 4, "text_anchor": "end"}
    element(picture, "text", text, class_="small cliptext", **place)


def _is_one_level(points: Sequence[Point], level: float) -> bool:
    """Whether all of these lie within two percent of a level."""
    return all(abs(value - level) <= 0.02 * level for _, value in points)


def _draw_broken(picture: ElementTree.Element, area: Area, steps: Sequence[Step]) -> None:
    """A cross on the upper edge for each column with a step whose norm is not finite."""
    broken = [step for step in steps if not math.isfinite(_before(step)[1])]
    for _, group in groupby(broken, key=lambda step: area.column(step.step)):
        here = list(group)
        x = area.x(here[0].step)
        kind = "skipped" if all(step.skipped for step in here) else "critical"
        cross = f"M{x - 4:.1f} {area.top + 4:g}l8 8m0 -8l-8 8M{x:.1f} {area.top + 14:g}v6"
        mark = element(picture, "path", class_=f"mark {kind}", d=cross)
        numbers = [str(step.step) for step in here]
        element(mark, "title", f"not finite at step {listed(numbers, 3)}")


def _labels(findings: Sequence[Finding], area: Area) -> list[_Label]:
    """What was found, by the step it began at, in rows where no text lies on another."""
    labels: list[_Label] = []
    ends: list[float] = []
    ordered = sorted(findings, key=lambda finding: (finding.first_step, finding.code))
    for step, group in groupby(ordered, key=lambda finding: finding.first_step):
        here = tuple(group)
        text = listed([finding.code for finding in here], 3)
        x = area.x(step)
        # At the right edge the text stands before its line.
        begins = min(x, _WIDTH - 4 - _SIGN * len(text))
        lane = next((row for row, end in enumerate(ends) if end < begins), len(ends))
        ends[lane : lane + 1] = [begins + _SIGN * len(text) + 8]
        labels.append(_Label(here, text, x, begins, lane))
    return labels


def _draw_label(picture: ElementTree.Element, area: Area, label: _Label) -> None:
    """A line down from the codes, in the colour of the worst."""
    # "critical" comes before "warning" in the alphabet too.
    severity = min(finding.severity for finding in label.findings)
    y = _TITLE + _LANE * label.lane
    line = f"M{label.x:.1f} {y + 3:.1f}V{area.bottom:g}"
    mark = element(picture, "g")
    said = [f"{finding.code} {finding.name}: {finding.evidence}" for finding in label.findings]
    element(mark, "title", "\n".join(said))
    element(mark, "path", class_=f"mark {severity}", d=line)
    element(mark, "text", label.text, class_=f"small {severity}", x=label.begins, y=y)


def _notes(summary: Summary, steps: Sequence[Step]) -> list[tuple[str, str]]:
    """The lines below the plot, with the kind of text each is."""
    notes = []
    findings = summary.health.findings
    for finding in findings[:_MOST_LISTED]:
        text = f"{finding.code} {finding.name}, {finding.severity}, from step {finding.first_step}"
        notes.append((safe(text), finding.severity))
    if len(findings) > _MOST_LISTED:
        notes.append((f"and {len(findings) - _MOST_LISTED} more in report.md", "small"))
    broken = [step for step in steps if not math.isfinite(_before(step)[1])]
    if broken:
        text = f"✕ not finite on {counted(len(broken), 'step')}, first at {broken[0].step}"
        for who, count in Counter(step.left_out_by for step in broken if step.skipped).items():
            text += f"; {count} left out by {who}"
        notes.append((text, "small"))
    zero = sum(step.total_norm == 0 for step in steps)
    if zero:
        notes.append((f"on the lower edge: zero on {counted(zero, 'step')}", "small"))
    return notes
