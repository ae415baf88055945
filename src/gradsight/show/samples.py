"""The influence of samples and domains as text, for a terminal and for report.md. No torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len

from gradsight.show.figures import bar, figure, trend
from gradsight.show.influence import UNSETTLED, Domain, Influence
from gradsight.show.text import BOLD, GREEN, RED, WIDTH, shortened, tinted
from gradsight.values.plain import listed
from gradsight.values.texts import for_markdown, in_a_column, in_code

TextOf = Callable[[str], str | None]
"""A sample's text by its id; None where that is not known."""
_MOST_DOMAINS = 30
_MOST_TARGETS = 30
_OFTEN = 3
"""Times that a typical sample must have been seen for its mean to say much."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A sample in a table."""

    sample_id: str
    domain: str
    score: str
    seen: str
    text: str | None


def influence_lines(
    influence: Influence, top: int, text_of: TextOf, by: str = "sample", colour: bool = False
) -> list[str]:
    """Everything about a run's samples, or about its domains alone, for a terminal."""
    title = f"Influence on {influence.target!r}: {_extent(influence)}"
    lines = [tinted(title, BOLD, colour), *_notes(influence)]
    if by == "domain":
        return [*lines, "", *_domain_table(influence, len(influence.domains), colour)]
    lines += ["", tinted("Samples by score", BOLD, colour), *_histogram(influence, colour)]
    best = _sample_table(influence, _best(influence, top), text_of)
    lines += ["", tinted("Best samples", f"{BOLD};{GREEN}", colour), *best]
    worst = _sample_table(influence, _worst(influence, top), text_of)
    lines += ["", tinted("Worst samples", f"{BOLD};{RED}", colour), *worst]
    if influence.domains:
        lines += ["", *_domain_table(influence, max(top, 8), colour)]
    return lines


def markdown_section(influence: Influence, text_of: TextOf, top: int = 3) -> list[str]:
    """A short section of report.md: the domains, and the samples at both ends."""
    lines = [
        f"## Samples: their influence on {for_markdown(repr(influence.target))}",
        "",
        f"{_extent(influence)}. {for_markdown(' '.join(_notes(influence)))}",
        "",
    ]
    if influence.domains:
        lines += ["### Domains", "", *_markdown_domains(influence), ""]
    lines += ["### Best and worst samples", ""]
    lines += ["| sample | domain | score | seen | text |", "| --- | --- | ---: | ---: | --- |"]
    for place in (*_best(influence, top), *reversed(_worst(influence, top))):
        row = _sample(influence, place, text_of)
        text = "–" if row.text is None else f"`{in_code(shortened(row.text, 48))}`"
        cells = [for_markdown(row.sample_id), for_markdown(row.domain), row.score, row.seen, text]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _markdown_domains(influence: Influence) -> list[str]:
    lines = [
        "| domain | score | samples | below 0 | over time |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    low, high = _scale(influence.domains)
    for domain in influence.domains[:_MOST_DOMAINS]:
        cells = [
            for_markdown(domain.name),
            _number(influence, domain.score),
            f"{domain.samples:,}",
            f"{domain.below_zero:.0%}",
            f"`{trend(domain.over_time, low, high)}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    more = len(influence.domains) - _MOST_DOMAINS
    if more > 0:
        lines.append(f"\n{more} more domains: `gradsight influence --by domain`.")
    return lines


def _few(influence: Influence, top: int) -> int:
    """How many samples are shown at each end; at most half of all, so that none is shown twice."""
    return max(1, min(top, len(influence.scores) // 2))


def _best(influence: Influence, top: int) -> range:
    """The places of the best samples, the best first."""
    last = len(influence.scores) - 1
    return range(last, last - _few(influence, top), -1)


def _worst(influence: Influence, top: int) -> range:
    """The places of the worst samples, the worst first."""
    return range(_few(influence, top))


def _extent(influence: Influence) -> str:
    scores = f"{influence.rows:,} scores of {len(influence.scores):,} samples"
    return f"{scores}, steps {influence.first_step} to {influence.last_step}"


def _notes(influence: Influence) -> list[str]:
    """What the numbers are, and how far they can be trusted."""
    lines = ["Raw scores, as recorded: they shrink as training goes on."]
    if influence.normalised:
        lines = [
            "1 is the typical size of a score in its step; above 0 helps the target.",
            f"The first {UNSETTLED:.0%} of the steps do not count: "
            "any sample teaches common tokens.",
        ]
    if influence.is_share:
        lines = [
            "Shares of the decrease that each step predicted: 1 is all of it, below 0 hurts.",
            f"The first {UNSETTLED:.0%} of the steps do not count, nor do "
            f"{influence.steps_left_out:,} steps that predict no clear decrease.",
        ]
    if float(np.median(influence.seen)) < _OFTEN:
        lines += [
            "Most samples were scored only a few times, so one score is mostly noise. "
            "Domains are more reliable."
        ]
    if influence.not_finite:
        lines.append(f"{influence.not_finite:,} scores are NaN or infinite; they count nowhere.")
    others = [in_a_column(name) for name in influence.targets if name != influence.target]
    if others:
        lines.append(f"Further targets: {listed(others, _MOST_TARGETS)} (see --target).")
    return lines


def _number(influence: Influence, value: float) -> str:
    """A score with its sign: normalised ones are of the size of 1, raw ones of any."""
    if influence.normalised:
        return f"{value:+.2f}"
    sign = "+" if value > 0 else ""
    return f"{sign}{figure(value)}"


def _histogram(influence: Influence, colour: bool) -> list[str]:
    counts, edges = influence.histogram()
    largest = max(counts.max(), 1)
    lines = [f"  {'score':>9}  {'samples':>7}"]
    for place, count in enumerate(counts.tolist()):
        low = float(edges[place])
        high = float(edges[place + 1])
        # A bin with samples is never empty on paper, however few they are.
        drawn = bar(count / largest, 50) or ("▏" if count else "")
        # The outermost bin on the left also holds what lies beyond it.
        reach = f"≥ {_number(influence, low)}" if place else f"< {_number(influence, high)}"
        shown = tinted(drawn, RED if low + high < 0 else GREEN, colour)
        lines.append(f"  {reach:>9}  {count:>7,}  {shown}".rstrip())
    below = float((influence.scores < 0).mean())
    mean = _number(influence, float(influence.scores.mean()))
    return [*lines, f"  mean {mean}; {below:.1%} of the samples are below 0"]


def _sample_table(influence: Influence, places: Sequence[int], text_of: TextOf) -> list[str]:
    rows = [_sample(influence, place, text_of) for place in places]
    id_width = _column_width([row.sample_id for row in rows], 18)
    domain_width = _column_width([row.domain for row in rows], 18)
    room = WIDTH - 24 - id_width - domain_width
    title = f"  {'score':>9}  {'seen':>5}  {'sample':<{id_width}}  {'domain':<{domain_width}}"
    if any(row.text is not None for row in rows):
        title += "  text"
    lines = [title]
    for row in rows:
        sample_id = shortened(row.sample_id, id_width)
        domain = shortened(row.domain, domain_width)
        text = "" if row.text is None else shortened(row.text, room)
        cells = f"{row.score:>9}  {row.seen:>5}  {sample_id}  {domain}  {text}"
        lines.append(f"  {cells}".rstrip())
    return lines


def _column_width(texts: Sequence[str], most: int) -> int:
    return min(max(6, *(cell_len(text) for text in texts)), most)


def _sample(influence: Influence, place: int, text_of: TextOf) -> _Row:
    sample_id = str(influence.sample_ids[place])
    return _Row(
        sample_id=in_a_column(sample_id),
        domain=in_a_column(influence.sample_domains[place] or "–"),
        score=_number(influence, float(influence.scores[place])),
        seen=f"{influence.seen[place]}x",
        text=text_of(sample_id),
    )


def _domain_table(influence: Influence, most: int, colour: bool) -> list[str]:
    domains = list(influence.domains)
    if not domains:
        return ["The samples of this run have no domains."]
    shown = domains
    if len(domains) > most:
        shown = domains[: most // 2] + domains[-(most // 2) :]
    width = _column_width([in_a_column(domain.name) for domain in shown], 24)
    low, high = _scale(shown)
    lines = [tinted("Domains, the best first", BOLD, colour)]
    lines.append(f"  {'score':>9}  {'samples':>8}  {'below 0':>7}  {'domain':<{width}}  over time")
    for number, domain in enumerate(shown):
        if len(shown) < len(domains) and number == most // 2:  # between the best and the worst
            lines.append(f"  … {len(domains) - len(shown)} more: --by domain")
        score = _number(influence, domain.score)
        numbers = f"{score:>9}  {domain.samples:>8,}  {domain.below_zero:>7.0%}"
        curve = trend(domain.over_time, low, high)
        lines.append(f"  {numbers}  {shortened(domain.name, width)}  {curve}".rstrip())
    return lines


def _scale(domains: Sequence[Domain]) -> tuple[float, float]:
    """One scale for the curves of all domains, so that they can be compared."""
    values = [
        value
        for domain in domains
        for value in domain.over_time
        if value is not None and math.isfinite(value)
    ]
    return min(values, default=0.0), max(values, default=0.0)
