"""The influence of samples and domains as text: for a terminal of 80 columns, and for report.md. No
torch.
"""

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
from rich.cells import cell_len, set_cell_size

from gradsight.show.figures import bar, figure, trend
from gradsight.show.influence import UNSETTLED, Domain, Influence

TextOf = Callable[[str], str | None]
"""A sample's text by its id; None where that is not known."""
_WIDTH = 79
_MOST_DOMAINS = 30
_OFTEN = 3
"""Times that a typical sample must have been seen for its mean to say much."""


def terminal_lines(
    found: Influence, top: int, text_of: TextOf, by: str = "sample", colour: bool = False
) -> list[str]:
    """Everything about a run's samples, or about its domains alone."""
    lines = [
        _tinted(f"Influence on {found.target!r}: {_extent(found)}", "1", colour),
        *_notes(found),
    ]
    if by == "domain":
        return [*lines, "", *_domain_table(found, len(found.domains), colour)]
    lines += ["", _tinted("Samples by score", "1", colour), *_histogram(found, colour)]
    few = max(1, min(top, len(found.scores) // 2))
    best, worst = range(len(found.scores) - 1, len(found.scores) - 1 - few, -1), range(few)
    lines += ["", _tinted("Best samples", "1;32", colour), *_sample_table(found, best, text_of)]
    lines += ["", _tinted("Worst samples", "1;31", colour), *_sample_table(found, worst, text_of)]
    if found.domains:
        lines += ["", *_domain_table(found, max(top, 8), colour)]
    return lines


def markdown_section(found: Influence, text_of: TextOf, top: int = 3) -> list[str]:
    """A short section of report.md: the domains, and the samples at both ends."""
    lines = [
        f"## Samples: their influence on {found.target!r}",
        "",
        f"{_extent(found)}. {' '.join(_notes(found))}",
        "",
    ]
    if found.domains:
        lines += [
            "| domain | score | samples | below 0 | over time |",
            "| --- | ---: | ---: | ---: | --- |",
        ]
        scale = _scale(found.domains)
        lines += [
            f"| {_cell(each.name)} | {_number(found, each.score)} | {each.samples:,} | {each.below_zero:.0%} "
            f"| `{trend(each.over_time, *scale)}` |"
            for each in found.domains[:_MOST_DOMAINS]
        ]
        if len(found.domains) > _MOST_DOMAINS:
            lines.append(
                f"\n{len(found.domains) - _MOST_DOMAINS} more domains: `gradsight influence --by domain`."
            )
        lines.append("")
    few = max(1, min(top, len(found.scores) // 2))
    lines += ["| sample | domain | score | seen | text |", "| --- | --- | ---: | ---: | --- |"]
    for place in [
        *range(len(found.scores) - 1, len(found.scores) - 1 - few, -1),
        *range(few - 1, -1, -1),
    ]:
        sample_id, domain, score, seen, text = _sample(found, place, text_of)
        shown = "–" if text is None else f"`{_cell(shortened(text, 48)).rstrip()}`"
        lines.append(f"| {_cell(sample_id)} | {_cell(domain)} | {score} | {seen} | {shown} |")
    return lines


def shortened(text: str, width: int) -> str:
    """Text on one line of a width; whatever could move a terminal's cursor is a dot.

    >>> shortened("if x:\\n\\treturn \\x1b[31mred", 30).rstrip()
    'if x:⏎return ·[31mred'
    >>> shortened("abcdefgh", 5)
    'abcd…'
    """
    line = _plain(text)
    return (
        set_cell_size(line, width)
        if cell_len(line) <= width
        else set_cell_size(line, width - 1) + "…"
    )


def _plain(text: str) -> str:
    line = re.sub(r"\s*\n\s*", "⏎", text.strip(" \t")).replace("\t", " ")
    return "".join(sign if sign.isprintable() else "·" for sign in line)


def _cell(text: str) -> str:
    """Text that stays in its cell of a markdown table."""
    return _plain(text).replace("|", "¦").replace("`", "'")


def _extent(found: Influence) -> str:
    return f"{found.rows:,} scores of {len(found.scores):,} samples, steps {found.first_step} to {found.last_step}"


def _notes(found: Influence) -> list[str]:
    """What the numbers are."""
    lines = ["Raw scores, as recorded: they shrink as training goes on."]
    if found.normalised:
        lines = [
            "1 is the typical size of a score in its step; above 0 helps the target.",
            f"The first {UNSETTLED:.0%} of the steps do not count: any sample teaches common tokens.",
        ]
    if float(np.median(found.seen)) < _OFTEN:
        lines.append("Few looks at most samples: one score is mostly noise. Domains are surer.")
    if found.not_finite:
        lines.append(f"{found.not_finite:,} scores are NaN or infinite; they count nowhere.")
    others = [name for name in found.targets if name != found.target]
    if others:
        lines.append(f"Further targets: {', '.join(others)} (see --target).")
    return lines


def _number(found: Influence, value: float) -> str:
    """A score with its sign: normalised ones are of the size of 1, raw ones of any."""
    return f"{value:+.2f}" if found.normalised else f"{'+' if value > 0 else ''}{figure(value)}"


def _histogram(found: Influence, colour: bool) -> list[str]:
    counts, edges = found.histogram()
    lines = [f"  {'score':>9}  {'samples':>7}"]
    for count, low, high in zip(
        counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True
    ):
        drawn = bar(count / max(counts.max(), 1), 50) or ("▏" if count else "")
        reach = f"< {_number(found, high)}" if low == edges[0] else f"≥ {_number(found, low)}"
        lines.append(
            f"  {reach:>9}  {count:>7,}  {_tinted(drawn, '31' if low + high < 0 else '32', colour)}".rstrip()
        )
    below = float((found.scores < 0).mean())
    return [
        *lines,
        f"  mean {_number(found, float(found.scores.mean()))}; {below:.1%} of the samples are below 0",
    ]


def _sample_table(found: Influence, places: Sequence[int], text_of: TextOf) -> list[str]:
    rows = [_sample(found, place, text_of) for place in places]
    wide = [
        min(max(6, *(cell_len(cell) for cell in cells)), 18)
        for cells in zip(*(row[:2] for row in rows), strict=True)
    ]
    room = _WIDTH - 24 - sum(wide)
    lines = [f"  {'score':>9}  {'seen':>5}  {'sample':<{wide[0]}}  {'domain':<{wide[1]}}"]
    lines[0] += "" if all(row[-1] is None for row in rows) else "  text"
    for sample_id, domain, score, seen, text in rows:
        cells = (
            f"{score:>9}  {seen:>5}  {shortened(sample_id, wide[0])}  {shortened(domain, wide[1])}"
        )
        lines.append(f"  {cells}  {'' if text is None else shortened(text, room)}".rstrip())
    return lines


def _sample(found: Influence, place: int, text_of: TextOf) -> tuple[str, str, str, str, str | None]:
    sample_id = str(found.sample_ids[place])
    domain, score = found.sample_domains[place], _number(found, float(found.scores[place]))
    return (
        _plain(sample_id),
        _plain(domain or "–"),
        score,
        f"{found.seen[place]}x",
        text_of(sample_id),
    )


def _domain_table(found: Influence, most: int, colour: bool) -> list[str]:
    domains = found.domains
    if not domains:
        return ["The samples of this run have no domains."]
    shown = (
        [*domains] if len(domains) <= most else [*domains[: most // 2], *domains[-(most // 2) :]]
    )
    wide = min(max(6, *(cell_len(_plain(each.name)) for each in shown)), 24)
    scale = _scale(shown)
    lines = [_tinted("Domains, the best first", "1", colour)]
    lines.append(f"  {'score':>9}  {'samples':>8}  {'below 0':>7}  {'domain':<{wide}}  over time")
    for number, each in enumerate(shown):
        if len(shown) < len(domains) and number == most // 2:
            lines.append(f"  … {len(domains) - len(shown)} more: --by domain")
        cells = f"{_number(found, each.score):>9}  {each.samples:>8,}  {each.below_zero:>7.0%}  {shortened(each.name, wide)}"
        lines.append(f"  {cells}  {trend(each.over_time, *scale)}".rstrip())
    return lines


def _scale(domains: Sequence[Domain]) -> tuple[float, float]:
    """One scale for the curves of all domains, so that they can be compared."""
    values = [
        value
        for each in domains
        for value in each.over_time
        if value is not None and math.isfinite(value)
    ]
    return (min(values), max(values)) if values else (0.0, 0.0)


def _tinted(text: str, code: str, colour: bool) -> str:
    return f"\033[{code}m{text}\033[0m" if colour and text else text
