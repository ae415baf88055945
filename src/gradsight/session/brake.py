"""Does what was asked for about findings: calls, alerts, and stops training on all ranks.

Every finding goes out once, and once more where it has become critical. A failing action is a
problem of the run, and never stops training.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import numpy as np

from gradsight.core.group import PendingArrays, ProcessGroup
from gradsight.core.meeting import RanksMissing
from gradsight.core.problems import Problems
from gradsight.health.registry import CHECKS
from gradsight.session.on_finding import ALERT, SKIP, STOP, Action, FindingActions
from gradsight.store.sinks.queue import SinkQueue
from gradsight.store.sinks.step_sink import Alert
from gradsight.values.findings import Finding, StopTraining
from gradsight.values.health_report import Abstention
from gradsight.values.measured import MeasuredStep

_PATIENCE = timedelta(seconds=30)
"""How long ranks wait for each other at the end of a step: they have all just made it."""


class Brake:
    """An output of the line like the record; findings come to it with their causes, on rank 0."""

    title = "on_finding"

    def __init__(
        self,
        actions: FindingActions,
        sinks: SinkQueue | None,
        group: ProcessGroup,
        problems: Problems,
        raises: bool,
    ) -> None:
        """`raises`: whether stopping is an exception; a trainer's door stops its trainer itself."""
        self._actions = actions
        self._sinks = sinks
        self._problems = problems
        self._raises = raises
        self._done: set[tuple[str, int, str]] = set()
        self._to_stop_for: Finding | None = None
        self._agreement: StopAgreement | None = None
        if actions.includes(STOP):
            self._agreement = StopAgreement(group, problems)
        self.asked_to_stop: Finding | None = None
        """The finding that training is to stop for, once all ranks know of it."""

    # As an output.

    def write(self, measured: MeasuredStep, findings: Sequence[Finding]) -> None:
        """One step, and every finding that is new or has changed."""
        for finding in findings:
            self._act_on(finding)

    def finish(self, findings: Sequence[Finding], abstained: Sequence[Abstention]) -> None:
        """The run is over: what ranks sent last may be new."""
        for finding in findings:
            self._act_on(finding)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars are nothing to act on."""

    def log_scalar(self, step: int, name: str, value: float) -> None:
        """Scalars are nothing to act on."""

    def log_tracked(self, step: int, name: str, value: float) -> None:
        """Scalars are nothing to act on."""

    # On every rank.

    def end_step(self, judged_late: bool) -> None:
        """A step is made and written: raise StopTraining if it was the last one.

        `judged_late`: what was judged just now is the step before, for it had to be merged first.
        """
        if self._agreement is None:
            return
        finding = self._agreement.exchange(self._to_stop_for, waits=judged_late)
        self._to_stop_for = None
        if finding is not None:
            self.asked_to_stop = finding
            if self._raises:
                raise StopTraining(finding)

    def close(self) -> None:
        """Leave the other ranks."""
        if self._agreement is not None:
            self._agreement.close()

    def _act_on(self, finding: Finding) -> None:
        key = (finding.code, finding.first_step, finding.severity)
        if key in self._done:
            return
        self._done.add(key)
        for action in self._actions.of(finding):
            try:
                self._act(action, finding)
            except StopTraining:
                raise
            except Exception as error:
                name = type(error).__name__
                self._problems.report(
                    "on_finding", f"on_finding failed for {finding.code}: {name}: {error}"
                )

    def _act(self, action: Action, finding: Finding) -> None:
        if not isinstance(action, str):
            action(finding)
        elif action == STOP:
            self._to_stop_for = self._to_stop_for or finding
        elif action == ALERT:
            self._alert(finding)
        else:
            # The step was left out before it was judged: nothing is left to be done.
            assert action == SKIP, action

    def _alert(self, finding: Finding) -> None:
        alerted = False
        if self._sinks is not None:
            title = f"{finding.code} {finding.name}"
            alerted = self._sinks.alert(Alert(title, _sentence(finding), finding.severity))
        if not alerted:
            self._problems.report(
                "on_finding-alert",
                'on_finding="alert" reaches nobody: alerts go to the sinks "wandb" and "trackio", '
                "and none of them is open",
            )


class StopAgreement:
    """Has all ranks stop after the same step, though only rank 0 judges.

    A number per step: sent when the step ends, read when the next one ends. By then it has come,
    for the gradients of that step were exchanged after it; so nobody waits. Where a step is judged
    one step late already, the ranks wait for each other's number instead.
    """

    def __init__(self, group: ProcessGroup, problems: Problems) -> None:
        """`group`: the ranks that watch."""
        self._problems = problems
        self._codes = sorted(CHECKS)
        self._sent: PendingArrays | None = None
        self._works = True
        # Ranks that do not watch do not stop either: they are said to be missing elsewhere.
        self._group = ProcessGroup(alone=True)
        try:
            if group.size > 1:
                self._group = ProcessGroup("stopping", timeout=_PATIENCE)
        except RanksMissing as error:
            self._give_up(error)

    def exchange(self, mine: Finding | None, waits: bool) -> Finding | None:
        """What all ranks are to stop for now; `mine` is what this one has found meanwhile."""
        if not self._works:
            return None
        if self._group.size == 1:
            return mine
        try:
            before = self._sent
            self._sent = self._group.start_sum(self._numbers(mine))
            read = self._sent if waits else before
            return None if read is None else self._finding(read.wait()[0])
        except Exception as error:
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        self._works = False
        self._problems.report(
            "on_finding-stop",
            'the ranks did not answer each other, so none of them stops (on_finding="stop"): '
            f"{type(error).__name__}: {error}",
        )

    def close(self) -> None:
        """Give the group back."""
        self._works = False
        self._sent = None
        self._group.close()

    def _numbers(self, mine: Finding | None) -> np.ndarray:
        if mine is None:
            return np.zeros(2)
        return np.array([1.0 + self._codes.index(mine.code), mine.first_step])

    def _finding(self, numbers: np.ndarray) -> Finding | None:
        if not numbers[0]:
            return None
        known = CHECKS[self._codes[int(numbers[0]) - 1]]
        first_step = int(numbers[1])
        return Finding(
            code=known.code,
            name=known.name,
            severity=known.severity,
            parameters=(),
            first_step=first_step,
            evidence="found on rank 0",
            message=known.meaning,
            recommendation=known.advice.recommendation,
            fix=known.advice.fix,
        )


def _sentence(finding: Finding) -> str:
    return (
        f"step {finding.first_step}: {finding.code} {finding.name} ({finding.severity}): "
        f"{finding.evidence}. {finding.recommendation}"
    )
