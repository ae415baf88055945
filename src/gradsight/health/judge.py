"""Runs the checks over the steps of a run.

Patience before a finding, hysteresis after it, one finding per code.
"""

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import get_args

from gradsight.health import checks
from gradsight.health.operations import advice_of
from gradsight.health.registry import MISSING, Advice, Check, CheckSettings, Fact, When, chosen
from gradsight.health.tailoring import fitted
from gradsight.health.window import Subject, Window
from gradsight.values.causes import BROKEN, with_causes
from gradsight.values.endings import LossAtEnd
from gradsight.values.findings import Finding
from gradsight.values.health_report import SEVERITIES, Abstention, ordered
from gradsight.values.measured import MeasuredStep, RankComparison, RankDigests
from gradsight.values.networks import UnmovedNetwork

# A new check is one new file: there is no list of checks to keep beside it.
for _module in pkgutil.iter_modules(checks.__path__):
    importlib.import_module(f"{checks.__name__}.{_module.name}")

_STRETCH = 10
_CALM = 10
"""Judgings without a fact before the next one counts as a new incident."""


@dataclass(slots=True)
class _Running:
    """A check at work: how often it agreed with itself lately, and what came of it."""

    settings: CheckSettings
    patience: int
    """The settings' own, kept here because it is asked for at every step."""
    streak: int = 0
    calm: int = 0
    began: int = 0
    made: int = 0
    """The step at which the finding was made, which began earlier."""
    parameters: dict[str, None] = field(default_factory=dict)
    finding: Finding | None = None
    incidents: int = 0
    evidence: str = ""
    advice: Advice | None = None
    """Of the facts, where it is another than the check's own."""

    @property
    def check(self) -> Check:
        """The check itself."""
        return self.settings.check


def checks_at_work(settings: object) -> list[CheckSettings]:
    """The checks to run with their thresholds: `health=` of `watch`, without False."""
    return chosen(settings)


class Judge:
    """Takes one measured step after the other, and returns every new or changed finding."""

    def __init__(self, subject: Subject, checks: Sequence[CheckSettings] | None = None) -> None:
        """`checks`: those at work, by default all with their own thresholds."""
        self.window = Window(subject)
        if checks is None:
            checks = checks_at_work(True)
        self._running = [_Running(each, each.patience) for each in checks]
        self._news: list[Finding] = []
        self._ready: dict[str, tuple[int, list[_Running]]] = {}
        self._by_when: dict[str, list[_Running]] = {when: [] for when in get_args(When)}
        for running in self._running:
            self._by_when[running.check.asked.when].append(running)

    def observe(self, measured: MeasuredStep, patient: bool = True) -> list[Finding]:
        """Judge one step. Without patience, one look must do."""
        window = self.window
        window.take(measured)
        self._ask(self._able("step"), patient)
        if measured.details is not None:
            self._ask(self._able("look"), patient)
        if measured.signals.first is not None:
            self._ask(self._able("first"), patient)
        if measured.signals.passes is not None:
            self._ask(self._able("passes"), patient)
        if window.steps_seen % _STRETCH == 0 or not patient:
            self._ask(self._able("stretch"), patient)
        # Entered after the checks have looked: a step is compared with its past, not with itself.
        if measured.norms is not None:
            finite = measured.finite and isfinite(measured.norms.total)
            window.baseline.enter(window.logarithms, finite)
            if window.steps_seen % _STRETCH == 0:
                window.take_baseline()
        return self._take_news()

    def compare(self, comparison: RankComparison) -> list[Finding]:
        """Judge what every rank brought to the gradient of a step that was observed before."""
        self.window.take_ranks(comparison)
        self._ask(self._able("ranks"), patient=True)
        return self._take_news()

    def compare_digests(self, all_digests: Sequence[RankDigests]) -> list[Finding]:
        """Judge checksums of all ranks, of steps that were observed before."""
        for digests in all_digests:
            self.window.take_digests(digests)
            self._ask(self._able("digests"), patient=True)
        return self._take_news()

    def compare_networks(self, networks: Sequence[UnmovedNetwork]) -> list[Finding]:
        """Judge which networks of a script no optimizer has moved."""
        self.window.take_networks(networks)
        self._ask(self._able("networks"), patient=False)
        return self._take_news()

    def failed_on(self, loss: LossAtEnd) -> list[Finding]:
        """Judge the loss that the script failed on."""
        window = self.window
        made = [each.finding.code for each in self._running if each.finding is not None]
        # A later optimizer step shows that the script survived this loss.
        is_over = window.steps_seen and window.step.step >= loss.step
        # A loss times the factor of a GradScaler may be infinite on purpose.
        is_scaled = loss.state == "inf" and window.step.scale is not None
        if not (is_over or is_scaled or set(made) & set(BROKEN)):
            window.at_end = loss
            asked = [each for each in self._running if each.check.asked.at_failure]
            self._ask(asked, patient=False)
        return self._take_news()

    def advised(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return the findings, each with advice for the operation that caused it."""
        special = {each.check.code for each in self._running if each.advice is not None}
        advised = []
        for finding in findings:
            advice = None if finding.code in special else advice_of(finding)
            if advice is not None:
                words = fitted(advice.tidy(), self.window)
                finding = replace(finding, recommendation=words.recommendation, fix=words.fix)
            advised.append(finding)
        return advised

    def findings(self) -> list[Finding]:
        """What has been found so far, the worst first, each after what it follows from."""
        return ordered([each.finding for each in self._running if each.finding is not None])

    def abstentions(self) -> list[Abstention]:
        """The checks that could not judge, and why."""
        result = []
        for each in self._running:
            lacking = [need for need in each.check.asked.needs if need not in self.window.signals]
            if lacking and each.finding is None:
                reason = self.window.unseen.get(lacking[0], MISSING[lacking[0]])
                result.append(Abstention(each.check.code, each.check.name, reason))
        return result + self._not_judged()

    def _not_judged(self) -> list[Abstention]:
        """Checks of the first step that had nothing to go by, each for a reason of its own."""
        reasons = dict(self.window.not_judged)
        result = []
        for each in self._running:
            reason = reasons.get(each.check.code)
            if reason is not None and each.finding is None:
                result.append(Abstention(each.check.code, each.check.name, reason))
        return result

    def finish(self) -> list[Finding]:
        """The run is over: the findings that came more than once, with their count."""
        for each in self._running:
            if each.finding is not None and each.incidents > 1:
                evidence = f"{each.evidence}; {each.incidents} times in all"
                self._tell(each, replace(each.finding, evidence=evidence))
        return self._take_news()

    def _take_news(self) -> list[Finding]:
        if not self._news:
            return []
        # As far as it is known by now; a report looks at all findings again.
        news = self._news
        self._news = []
        known = [each.finding for each in self._running if each.finding is not None]
        causes = {finding.code: finding.caused_by for finding in with_causes(known)}
        return [replace(each, caused_by=causes[each.code]) for each in news]

    def _ask(self, asked: Sequence[_Running], patient: bool) -> None:
        """Run checks on the window."""
        window = self.window
        # The loop body is not a function of its own, because it runs often at every step.
        for each in asked:
            check = each.settings.check
            gate = check.asked.gate
            facts: Sequence[Fact] = ()
            if gate is None or gate(window):
                facts = list(check.function(window, **each.settings.thresholds))
            if facts or each.streak or each.finding is not None:
                self._weigh(each, facts, patient)

    def _able(self, when: str) -> list[_Running]:
        """The checks whose signals have been seen.

        Asked for at every step, so remembered until there is a new signal.
        """
        # Signals only ever come, so their number tells whether there is a new one.
        seen, able = self._ready.get(when, (-1, []))
        signals = self.window.signals
        if seen != len(signals):
            able = [
                each for each in self._by_when[when] if signals.issuperset(each.check.asked.needs)
            ]
            self._ready[when] = (len(signals), able)
        return able

    def _weigh(self, each: _Running, facts: Sequence[Fact], patient: bool) -> None:
        """Count agreement; make, widen or end a finding."""
        if not facts:
            each.streak = 0
            each.calm += 1
            return
        if each.streak == 0:
            each.began = self.window.step.step
        each.streak += 1
        if patient and each.streak < each.patience:
            return
        again = each.calm >= _CALM
        each.calm = 0
        if each.finding is None:
            self._make(each, facts)
        else:
            each.incidents += again
            self._widen(each, each.finding, facts)

    def _make(self, each: _Running, facts: Sequence[Fact]) -> None:
        """A new finding."""
        each.parameters = dict.fromkeys(_parameters(facts))
        each.incidents = 1
        each.evidence = facts[0].evidence
        each.advice = facts[0].advice
        first_step = facts[0].first_step
        if first_step is None:
            first_step = each.began
        each.made = max(self.window.step.step, first_step)
        self._tell(each, self._finding(each, _severity(each.check, facts), first_step))

    def _widen(self, each: _Running, known: Finding, facts: Sequence[Fact]) -> None:
        """A finding that is known already: told again only where it got worse or larger."""
        severity = _severity(each.check, facts)
        worse = SEVERITIES.index(severity) > SEVERITIES.index(known.severity)
        names = _parameters(facts)
        if not worse and each.parameters.keys() >= set(names):
            return
        each.parameters |= dict.fromkeys(names)
        if worse or each.parameters.keys() <= set(names):
            # The new evidence is about all that the finding names.
            each.evidence = facts[0].evidence
            each.advice = facts[0].advice
        severity = severity if worse else known.severity
        self._tell(each, self._finding(each, severity, known.first_step))

    def _finding(self, each: _Running, severity: str, first_step: int) -> Finding:
        check = each.check
        advice = (each.advice or check.advice).tidy()
        if advice.if_clipped is not None and self.window.clips_already:
            advice = advice.if_clipped
        advice = fitted(advice, self.window)
        return Finding(
            code=check.code,
            name=check.name,
            severity=severity,
            parameters=tuple(each.parameters),
            first_step=first_step,
            evidence=each.evidence,
            message=check.meaning,
            recommendation=advice.recommendation,
            fix=advice.fix,
            family=check.family,
            made_step=each.made,
        )

    def _tell(self, each: _Running, finding: Finding) -> None:
        each.finding = finding
        self._news.append(finding)


def _parameters(facts: Sequence[Fact]) -> list[str]:
    return [name for fact in facts for name in fact.parameters]


def _severity(check: Check, facts: Sequence[Fact]) -> str:
    """The worst severity of these facts."""
    return max((fact.severity or check.severity for fact in facts), key=SEVERITIES.index)
