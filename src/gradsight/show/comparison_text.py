"""A comparison of two runs on a terminal of 80 columns. No torch."""

from collections.abc import Sequence

from rich.cells import cell_len

from gradsight.show.comparison import (
    NOISE,
    FirstDifference,
    OneSided,
    RunComparison,
    Setting,
)
from gradsight.show.text import BOLD, GREEN, RED, shortened, tinted
from gradsight.values.findings import Finding
from gradsight.values.plain import counted
from gradsight.values.texts import on_one_line

_MOST = 10
_WIDTHS = (36, 8, 8, 11, 11)
_WORDS = {
    "l2": "norm",
    "max_abs": "largest",
    "lr": "learning rate",
    "total_norm": "total norm",
    "clip_coef": "clipping",
    "scale": "loss scale",
}


def comparison_lines(comparison: RunComparison, a: str, b: str, colour: bool = False) -> list[str]:
    """The comparison as lines: the verdict, where they part, and what else differs."""
    lines = [_verdict(comparison, colour), f"   a: {on_one_line(a)}", f"   b: {on_one_line(b)}"]
    lines += [f"   {text}" for text in _extents(comparison)]
    lines += _table("Gradients, each where it differs first", comparison.parameters)
    lines += _table("Numbers of the steps, each where it differs first", comparison.numbers)
    lines += _one_sided(comparison.one_sided)
    lines += _findings("Findings of a alone", comparison.findings_a)
    lines += _findings("Findings of b alone", comparison.findings_b)
    lines += _settings("Settings", comparison.settings)
    lines += _settings("Versions", comparison.versions)
    return lines


def _verdict(comparison: RunComparison, colour: bool) -> str:
    steps = counted(comparison.common_steps, "common step")
    if comparison.same:
        how = "to the last bit" if comparison.exact else f"within a relative {NOISE:g}"
        text = f"✅ the same {how} in {steps}"
        if comparison.one_sided:
            text = f"✅ no difference in what both runs recorded, {how}, in {steps}"
        return tinted(text, f"{BOLD};{GREEN}", colour)
    first = comparison.first
    text = "❌ nothing to compare: the runs have no step in common"
    if first is not None:
        text = f"❌ different from step {first.step} on: {_named(first)}"
    return tinted(text, f"{BOLD};{RED}", colour)


def _named(difference: FirstDifference) -> str:
    if difference.what == "missing":
        return "only one run has it"
    words = f"{_number(difference.a)} and {_number(difference.b)}"
    if difference.parameter is None:
        return f"{_WORDS.get(difference.what, difference.what)} {words}"
    return f"{on_one_line(difference.parameter)}, {_WORDS[difference.what]} {words}"


def _extents(comparison: RunComparison) -> list[str]:
    """Which steps were compared, and which only one run has."""
    lines = []
    for label, steps in (("a", comparison.only_a), ("b", comparison.only_b)):
        if steps.count:
            where = f"from {steps.first} to {steps.last}"
            lines.append(f"{counted(steps.count, 'step')} of {label} alone, {where}")
    return lines


def _table(title: str, differences: Sequence[FirstDifference]) -> list[str]:
    if not differences:
        return []
    lines = ["", f"{title}:", _row("", "step", "", "a", "b")]
    for each in differences[:_MOST]:
        what = _WORDS.get(each.what, each.what)
        cells = (str(each.step), "", _number(each.a), _number(each.b))
        if each.parameter is None:
            lines.append(_row(what, *cells))
        else:
            lines.append(_row(each.parameter, cells[0], what, *cells[2:]))
    return lines + _rest(len(differences))


def _row(*cells: str) -> str:
    """A row of a table; a name that is too long for its column gets a line of its own."""
    name = on_one_line(cells[0])
    lines = []
    if cell_len(name) > _WIDTHS[0]:
        lines.append(f"   {name}")
        name = ""
    padded = [
        shortened(text, width) for text, width in zip((name, *cells[1:]), _WIDTHS, strict=True)
    ]
    return "\n".join([*lines, f"   {' '.join(padded)}".rstrip()])


def _one_sided(numbers: Sequence[OneSided]) -> list[str]:
    """What one run did not record."""
    if not numbers:
        return []
    lines = ["", "Recorded in one run only, and so not compared there:"]
    for each in numbers:
        sides = [("a", each.only_a), ("b", each.only_b)]
        where = [f"only in {name} at {counted(count, 'step')}" for name, count in sides if count]
        what = _WORDS.get(each.what, each.what)
        lines.append(f"   {what}: {', '.join(where)}, first at step {each.first}")
    return lines


def _rest(count: int) -> list[str]:
    if count <= _MOST:
        return []
    return [f"   and {count - _MOST} more; --json has them all"]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.5g}"


def _findings(title: str, findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return []
    named = [f"{each.code} {each.name}, since step {each.first_step}" for each in findings]
    return [
        "",
        f"{title}:",
        *(f"   {on_one_line(text)}" for text in named[:_MOST]),
        *_rest(len(named)),
    ]


def _settings(title: str, settings: Sequence[Setting]) -> list[str]:
    if not settings:
        return []
    named = [f"{each.name}: {each.a!r} and {each.b!r}" for each in settings]
    shown = [f"   {shortened(text, 76).rstrip()}" for text in named[:_MOST]]
    return ["", f"{title} that differ:", *shown, *_rest(len(named))]
