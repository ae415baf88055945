"""Runs the checks over the steps of a run: patience before a finding, hysteresis after it, one
finding per code.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, get_args

from gradsight.health import checks
from gradsight.health.registry import MISSING, Check, Fact, When, chosen
from gradsight.health.window import Observed, RankLook, Subject, Window
from gradsight.values.findings import Finding
from gradsight.values.health_report import SEVERITIES, Abstention

for _module in pkgutil.iter_modules(checks.__path__):
    importlib.import_module(f"{checks.__name__}.{_module.name}")

_STRETCH = 10
_CALM = 10
"""Judgings without a fact before the next one counts as a new incident."""
_OUTLIER = (10.0, 8.0)
"""From here on a step is kept out of the baseline: tenfold the median, and this many spreads above
it.
"""


@dataclass(slots=True)
class _Running:
    """A check at work."""

    check: Check
    settings: dict[str, Any]
    patience: int
    streak: int = 0
    calm: int = 0
    began: int = 0
    parameters: dict[str, None] = field(default_factory=dict)
    finding: Finding | None = None
    incidents: int = 0
    evidence: str = ""


class Judge:
    """Takes one observed step after the other; `on_finding` hears of every new or changed finding."""

    def __init__(
        self,
        subject: Subject,
        settings: object = True,
        on_finding: Callable[[Finding], None] | None = None,
    ) -> None:
        self.window = Window(subject)
        self._on_finding = on_finding
        running = [
            _Running(check, values, int(values.get("patience", 1)))
            for check, values in chosen(settings)
        ]
        self._running = running
        self._ready: dict[str, tuple[int, list[_Running]]] = {}
        self._by_when = {
            when: [each for each in running if each.check.when == when] for when in get_args(When)
        }

    def observe(self, observed: Observed, patient: bool = True) -> None:
        """Judge one step. Without patience, one look must do."""
        window = self.window
        window.take(observed)
        self._run("step", patient)
        if observed.closer is not None:
            self._run("look", patient)
        if window.steps_seen % _STRETCH == 0 or not patient:
            self._run("stretch", patient)
        if observed.l2 is not None:
            finite = observed.counts is None and isfinite(observed.total)
            window.baseline.enter(window.logarithms, finite, self._is_outlier())

    def compare(self, look: RankLook) -> None:
        """Judge what every rank brought to the gradient of a step that was observed before."""
        self.window.take_ranks(look)
        self._run("ranks", patient=True)

    def findings(self) -> list[Finding]:
        """What has been found so far, the worst first."""
        found = [each.finding for each in self._running if each.finding is not None]
        return sorted(
            found,
            key=lambda finding: (
                -SEVERITIES.index(finding.severity),
                finding.first_step,
                finding.code,
            ),
        )

    def abstentions(self) -> list[Abstention]:
        """The checks that could not judge, and why."""
        result = []
        for each in self._running:
            lacking = [need for need in each.check.needs if need not in self.window.signals]
            if lacking and each.finding is None:
                result.append(Abstention(each.check.code, each.check.name, MISSING[lacking[0]]))
        return result

    def limits(self) -> dict[str, Mapping[str, Any]]:
        """The settings of every check at work, by code."""
        return {each.check.code: each.settings for each in self._running}

    def finish(self) -> None:
        """The run is over: tell what the findings came to."""
        for each in self._running:
            if each.finding is not None and each.incidents > 1:
                self._tell(
                    each,
                    replace(
                        each.finding, evidence=f"{each.evidence}; {each.incidents} times in all"
                    ),
                )

    def _run(self, when: str, patient: bool) -> None:
        window = self.window
        for each in self._able(when):
            gate = each.check.gate
            facts = (
                list(each.check.function(window, **each.settings))
                if gate is None or gate(window)
                else ()
            )
            if facts or each.streak or each.finding is not None:
                self._weigh(each, facts, patient)

    def _able(self, when: str) -> list[_Running]:
        """The checks whose signals have been seen; asked for at every step, so remembered until
        there is a new signal.
        """
        seen, able = self._ready.get(when, (-1, []))
        signals = self.window.signals
        if seen != len(signals):
            able = [each for each in self._by_when[when] if signals.issuperset(each.check.needs)]
            self._ready[when] = (len(signals), able)
        return able

    def _weigh(self, each: _Running, facts: Sequence[Fact], patient: bool) -> None:
        """Count agreement; make, widen or end a finding."""
        if not facts:
            each.streak = 0
            each.calm += 1
            return
        if each.streak == 0:
            each.began = self.window.now.step.step
        each.streak += 1
        if patient and each.streak < each.patience:
            return
        fact = facts[0]
        names = [name for one in facts for name in one.parameters]
        severity = max((one.severity or each.check.severity for one in facts), key=SEVERITIES.index)
        fresh = each.calm >= _CALM or each.finding is None
        each.calm = 0
        if each.finding is None:
            each.parameters = dict.fromkeys(names)
            first = fact.first_step if fact.first_step is not None else each.began
            each.incidents, each.evidence = 1, fact.evidence
            self._tell(each, _finding(each, severity, first))
            return
        each.incidents += fresh
        worse = SEVERITIES.index(severity) > SEVERITIES.index(each.finding.severity)
        if worse or not each.parameters.keys() >= set(names):
            each.parameters |= dict.fromkeys(names)
            if worse:
                each.evidence = fact.evidence
            self._tell(
                each,
                _finding(
                    each, severity if worse else each.finding.severity, each.finding.first_step
                ),
            )

    def _tell(self, each: _Running, finding: Finding) -> None:
        each.finding = finding
        if self._on_finding is not None:
            self._on_finding(finding)

    def _is_outlier(self) -> bool:
        row = self.window.logarithms
        bound = self.window.baseline.bound(*_OUTLIER, len(row))
        return bound is not None and bool(row[-1] > bound[-1])


def _finding(each: _Running, severity: str, first_step: int) -> Finding:
    check = each.check
    return Finding(
        code=check.code,
        name=check.name,
        severity=severity,
        parameters=tuple(each.parameters),
        first_step=first_step,
        evidence=each.evidence,
        message=check.meaning,
        recommendation=check.recommendation,
        fix=check.fix,
        family=check.family,
    )
