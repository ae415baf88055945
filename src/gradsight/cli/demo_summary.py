"""What a demo run comes to, on one screen of 80 columns."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradsight.core import rundir
from gradsight.show.figures import figure, sparkline, trend
from gradsight.show.influence import Domain, Influence
from gradsight.show.samples import shortened
from gradsight.train.sample_texts import SampleTexts
from gradsight.values.diagnoses import GuiltySample
from gradsight.values.findings import Finding
from gradsight.values.health_report import headline
from gradsight.values.wording import named

if TYPE_CHECKING:
    from gradsight.show.markdown import Summary
    from gradsight.store.reader import Run
    from gradsight.train.demonstration import Demonstration

_GOOD, _BAD, _TITLE = "1;32", "1;31", "1;36"
_LABEL, _CURVE = 15, 40


def outline(
    run: "Run",
    summary: "Summary",
    texts: SampleTexts,
    planned: "Demonstration",
    poisoned: int,
    colour: bool,
) -> tuple[bool, list[str]]:
    """Whether the planted fault was found, and what to print: the verdict, the fault, the samples,
    memory, dumps.
    """

    def tinted(text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if colour else text

    finding = next(
        (each for each in summary.health.findings if each.first_step == planned.poisoned_step), None
    )
    culprit = (
        finding.diagnosis.samples[0]
        if finding is not None and finding.diagnosis and finding.diagnosis.samples
        else None
    )
    found = culprit is not None and culprit.sample_id == poisoned
    verdict = (
        "✅ found: the step and the sample are right"
        if found
        else "❌ not found: this is a fault of Gradsight's"
    )
    lines = [tinted("Verdict", _TITLE), *_verdict(summary)]
    lines += [
        "",
        tinted("The planted fault", _TITLE),
        *_fault(finding, culprit, texts, planned, poisoned),
    ]
    lines.append(tinted(f"  {verdict}", _GOOD if found else _BAD))
    if summary.samples is not None:
        lines += [
            "",
            tinted("What helped the validation loss, and what did not", _TITLE),
            *_samples(summary.samples, texts, poisoned),
        ]
    lines += ["", tinted("Memory and gradients on disk", _TITLE), *_memory(run)]
    return found, lines


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL}}{shortened(text, 78 - _LABEL).rstrip()}"


def _verdict(summary: "Summary") -> Iterator[str]:
    losses = [step.loss for step in summary.steps if step.loss is not None]
    norms = [step.total_norm for step in summary.steps if step.total_norm is not None]
    yield f"  {headline(summary.health)}"
    yield _line(
        "loss",
        f"{f'{figure(losses[0])} → {figure(losses[-1])}':<16}{sparkline(losses, _CURVE // 2)}",
    )
    yield _line(
        "gradient norm",
        f"{f'{figure(norms[0])} → {figure(norms[-1])}':<16}{sparkline(_peaks(norms), _CURVE)}",
    )


def _peaks(values: list[float]) -> list[float]:
    """The largest of each stretch, so that a single step shows."""
    length = -(-len(values) // _CURVE)
    return [max(values[start : start + length]) for start in range(0, len(values), length)]


def _fault(
    finding: Finding | None,
    culprit: GuiltySample | None,
    texts: SampleTexts,
    planned: "Demonstration",
    poisoned: int,
) -> Iterator[str]:
    yield _line(
        "planted",
        f"step {planned.poisoned_step}: sample {poisoned} counts {planned.poison:g} times, not once",
    )
    if finding is None:
        yield _line("seen", "nothing at that step")
        return
    yield _line(
        "seen",
        f"{finding.code} {finding.name}: {finding.evidence.removeprefix(f'step {finding.first_step}: ')}",
    )
    if culprit is not None:
        share = (
            "" if culprit.share is None else f": {culprit.share:.1%} of the squared gradient norm"
        )
        yield _line("culprit", f"{named(culprit, several=False)}{share}")
        yield _line("its text", texts(str(culprit.sample_id)) or "–")
    if finding.incident is not None:
        yield _line("kept in", finding.incident)


def _samples(found: Influence, texts: SampleTexts, poisoned: int) -> Iterator[str]:
    few = found.domains[:2], found.domains[-2:]
    values = [value for each in found.domains for value in each.over_time if value is not None]
    for label, domains in (("best", few[0]), ("worst", few[1])):
        for number, each in enumerate(domains):
            yield _line(
                f"{label} domains" if number == 0 else "", _domain(each, min(values), max(values))
            )
    for label, place in (("best sample", -1), ("worst sample", 0)):
        sample_id, domain = str(found.sample_ids[place]), found.sample_domains[place]
        who = f"the poisoned one, {domain}" if sample_id == str(poisoned) else domain
        yield _line(label, f"{found.scores[place]:+.2f}  {who}: {texts(sample_id) or '–'}")


def _domain(domain: Domain, low: float, high: float) -> str:
    return f"{domain.score:+.2f}  {domain.name:<17}{domain.samples:>4} samples  {trend(domain.over_time, low, high)}"


def _memory(run: "Run") -> Iterator[str]:
    memory = {scalar.name: scalar.value for scalar in run.memory()}
    plain, less = (1000 * memory[f"checkpointing/{name}_gb"] for name in ("baseline", "optimized"))
    same = (
        "gradients bit for bit the same"
        if memory["checkpointing/gradients_identical"]
        else "GRADIENTS DIFFER"
    )
    yield _line("one step", f"{plain:.0f} MB plain, {less:.0f} MB with activation checkpointing")
    yield _line("", f"{memory['checkpointing/reduction']:.0%} saved, {same}")
    dumps = sorted(
        (run.path / rundir.DUMPS).glob("step*"),
        key=lambda folder: int(folder.name.removeprefix("step")),
    )
    yield _line(
        "dumped",
        ", ".join(folder.name for folder in dumps) + ": every gradient, whole, with checksums",
    )
