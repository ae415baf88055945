"""What a demo run comes to, on one screen of 80 columns."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gradsight.core import rundir
from gradsight.show.figures import figure, sparkline, trend
from gradsight.show.influence import Domain, Influence
from gradsight.show.text import shortened, tinted
from gradsight.store.reader import open_run
from gradsight.values.diagnoses import GuiltySample
from gradsight.values.findings import Finding
from gradsight.values.health_report import headline
from gradsight.values.wording import named

if TYPE_CHECKING:
    from gradsight.show.summary import Summary
    from gradsight.train.demonstration import Demonstration
    from gradsight.train.sample_texts import SampleTexts

_GOOD, _BAD, _TITLE = "1;32", "1;31", "1;36"
_LABEL, _CURVE = 15, 40
_FOUND = "✅ found: the step and the sample are right"
_NOT_FOUND = "❌ not found: this is a fault of Gradsight's"


def demo_summary(
    run_dir: Path,
    summary: "Summary",
    texts: "SampleTexts",
    planned: "Demonstration",
    poisoned: int,
    colour: bool,
) -> tuple[bool, list[str]]:
    """Whether the planted fault was found, and the lines to print."""
    finding = _finding_of_step(summary, planned.poisoned_step)
    culprit = _culprit(finding)
    found = culprit is not None and culprit.sample_id == poisoned
    lines = [tinted("Verdict", _TITLE, colour), *_verdict(summary)]
    lines += ["", tinted("The planted fault", _TITLE, colour), *_planted(planned, poisoned)]
    lines += _seen(finding, culprit, texts)
    lines.append(
        tinted(f"  {_FOUND}", _GOOD, colour) if found else tinted(f"  {_NOT_FOUND}", _BAD, colour)
    )
    if summary.samples is not None:
        lines += ["", tinted("What helped the validation loss, and what did not", _TITLE, colour)]
        lines += _samples(summary.samples, texts, poisoned)
    lines += ["", tinted("Memory and gradients on disk", _TITLE, colour), *_memory(run_dir)]
    return found, lines


def _finding_of_step(summary: "Summary", step: int) -> Finding | None:
    for finding in summary.health.findings:
        if finding.first_step == step:
            return finding
    return None


def _culprit(finding: Finding | None) -> GuiltySample | None:
    """The sample that a finding's diagnosis blames first."""
    if finding is None or finding.diagnosis is None or not finding.diagnosis.samples:
        return None
    return finding.diagnosis.samples[0]


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL}}{shortened(text, 78 - _LABEL).rstrip()}"


def _verdict(summary: "Summary") -> Iterator[str]:
    losses = [step.loss for step in summary.steps if step.loss is not None]
    norms = [step.total_norm for step in summary.steps if step.total_norm is not None]
    yield f"  {headline(summary.health)}"
    yield _line("loss", f"{_from_to(losses)}{sparkline(losses, _CURVE // 2)}")
    yield _line("gradient norm", f"{_from_to(norms)}{sparkline(_peaks(norms), _CURVE)}")


def _from_to(values: list[float]) -> str:
    text = f"{figure(values[0])} → {figure(values[-1])}"
    return f"{text:<16}"


def _peaks(values: list[float]) -> list[float]:
    """The largest of each stretch, so that a single step shows."""
    length = -(-len(values) // _CURVE)
    return [max(values[start : start + length]) for start in range(0, len(values), length)]


def _planted(planned: "Demonstration", poisoned: int) -> Iterator[str]:
    times = f"counts {planned.poison:g} times, not once"
    yield _line("planted", f"step {planned.poisoned_step}: sample {poisoned} {times}")


def _seen(
    finding: Finding | None, culprit: GuiltySample | None, texts: "SampleTexts"
) -> Iterator[str]:
    if finding is None:
        yield _line("seen", "nothing at that step")
        return
    evidence = finding.evidence.removeprefix(f"step {finding.first_step}: ")
    yield _line("seen", f"{finding.code} {finding.name}: {evidence}")
    if culprit is not None:
        who = named(culprit, several=False)
        if culprit.share is not None:
            who += f": {culprit.share:.1%} of the squared gradient norm"
        yield _line("culprit", who)
        yield _line("its text", texts(str(culprit.sample_id)) or "–")
    if finding.incident is not None:
        yield _line("kept in", finding.incident)


def _samples(influence: Influence, texts: "SampleTexts", poisoned: int) -> Iterator[str]:
    domains = influence.domains
    values = [value for domain in domains for value in domain.over_time if value is not None]
    for label, few in (("best domains", domains[:2]), ("worst domains", domains[-2:])):
        for number, domain in enumerate(few):
            text = _domain(domain, min(values), max(values))
            yield _line(label if number == 0 else "", text)
    for label, index in (("best sample", -1), ("worst sample", 0)):
        sample_id = str(influence.sample_ids[index])
        who = influence.sample_domains[index]
        if sample_id == str(poisoned):
            who = f"the poisoned one, {who}"
        yield _line(label, f"{influence.scores[index]:+.2f}  {who}: {texts(sample_id) or '–'}")


def _domain(domain: Domain, low: float, high: float) -> str:
    curve = trend(domain.over_time, low, high)
    return f"{domain.score:+.2f}  {domain.name:<17}{domain.samples:>4} samples  {curve}"


def _memory(run_dir: Path) -> Iterator[str]:
    memory = {scalar.name: scalar.value for scalar in open_run(run_dir).memory()}
    plain = 1000 * memory["checkpointing/baseline_gb"]
    checkpointed = 1000 * memory["checkpointing/optimized_gb"]
    same = "GRADIENTS DIFFER"
    if memory["checkpointing/gradients_identical"]:
        same = "gradients bit for bit the same"
    yield _line(
        "one step", f"{plain:.0f} MB plain, {checkpointed:.0f} MB with activation checkpointing"
    )
    yield _line("", f"{memory['checkpointing/reduction']:.0%} saved, {same}")
    steps = [folder.name for folder in (run_dir / rundir.DUMPS).glob("step*")]
    steps.sort(key=lambda name: int(name.removeprefix("step")))
    yield _line("dumped", f"{', '.join(steps)}: every gradient, whole, with checksums")
