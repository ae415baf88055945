"""The judge of a watched run, with the ranks that it compares and the alarm that goes before it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradsight.core.group import ProcessGroup
from gradsight.core.optimizers import (
    innermost_optimizer,
    optimizer_list,
    parameters_of,
    wrapping,
)
from gradsight.core.parameters import Named
from gradsight.core.problems import Problems
from gradsight.core.shards import is_sharded
from gradsight.core.sharing import Sharing
from gradsight.health.alarm import Alarm
from gradsight.health.early_findings import EarlyFindings
from gradsight.health.judge import Judge
from gradsight.health.one_look import verdict_of
from gradsight.health.rank_agreement import RankAgreement
from gradsight.health.rank_digests import RankDigestExchange
from gradsight.health.ranks import RankComparer
from gradsight.health.registry import CheckSettings
from gradsight.health.subject import (
    group_of_rows,
    groups_of,
    memberships_of,
    only_optimizer,
    subject_of,
)
from gradsight.measure.host_copy import HostCopy
from gradsight.values.endings import LossAtEnd
from gradsight.values.findings import Finding, IncidentRule
from gradsight.values.health_report import Abstention, HealthReport
from gradsight.values.measured import MeasuredStep, RankComparison, RankDigests
from gradsight.values.networks import UnmovedNetwork
from gradsight.values.steps import CloserLooks

_MEMBERSHIPS = 50
"""Steps from one look at the optimizers' parameters to the next: groups may be added."""


@dataclass(frozen=True, slots=True)
class HealthOptions:
    """What is judged, and from which step on."""

    checks: Sequence[CheckSettings]
    closer_looks: CloserLooks
    early: bool = False
    """Whether bad steps must be known while their gradients are still true, on all ranks."""


class Health:
    """Judges every step of a watched run."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Named],
        optimizers: Any,
        options: HealthOptions,
        group: ProcessGroup,
        problems: Problems,
    ) -> None:
        self._parameters = parameters
        self._options = options
        self._optimizers = [innermost_optimizer(each) for each in optimizer_list(optimizers)]
        # ZeroRedundancyOptimizer holds more parameters than the optimizer inside it.
        chains = [wrapping(each) for each in optimizer_list(optimizers)]
        self._optimizers_elsewhere = [
            each for chain in chains for each in chain[:-1] if isinstance(each, Optimizer)
        ]
        self.unmoved: Sequence[UnmovedNetwork] | None = None
        """Networks of the script that no optimizer moves; None where nobody compared them."""
        self.at_end: LossAtEnd | None = None
        """The loss that the script failed on, if it was not finite."""
        subject = subject_of(model, parameters, self._optimizers)
        self._judge = Judge(subject, options.checks)
        # Of a shard this rank sees some units only.
        whole = [row for row in subject.matrices if not is_sharded(parameters[row].tensor)]
        # An expert may have to wait for its turn, and its units with it.
        of_experts = {row for group in subject.experts for row in group.rows}
        self.unit_rows = tuple(
            row for row in whole if subject.trainable[row] and row not in of_experts
        )
        """Weights whose dead units are to be counted."""
        self.alarm = self._new_alarm()
        self.early: EarlyFindings | None = None
        """What knows of a bad step in time to dump its gradient; None where nobody asked for it."""
        if options.early:
            tensors = [named.tensor for named in parameters]
            ranks = RankAgreement(model, tensors, problems) if group.size > 1 else None
            self.early = EarlyFindings(self._new_alarm(), ranks)
        self._late: list[RankComparison] = []
        self._ranks: RankComparer | None = None
        self._digests: RankDigestExchange | None = None
        if group.size > 1:
            tensors = [named.tensor for named in parameters]
            if group.incomplete is None:
                self._digests = RankDigestExchange(
                    tensors,
                    group,
                    Sharing(model, tensors).kind,
                    options.closer_looks.first_step,
                    problems,
                )
            self._ranks = RankComparer(model, tensors, group, options.closer_looks, problems)

    def _new_alarm(self) -> Alarm:
        """An alarm that has seen no step yet."""
        return Alarm(self._options.checks, whole_norms=len(self._optimizers) < 2)

    def incident_rules(self) -> dict[str, IncidentRule]:
        """By code: which findings are incidents, and whether they can be known early."""
        rules = {}
        for each in self._options.checks:
            incident = each.check.incident
            rules[each.check.code] = IncidentRule(incident.kept, incident.alarm is not None)
        return rules

    def add_optimizer(self, optimizer: Any, step: int) -> None:
        """Add an optimizer that trains the same parameters from this step on, or replaces one."""
        inner = innermost_optimizer(optimizer)
        given = parameters_of(inner)
        stay = [each for each in self._optimizers if parameters_of(each) - given]
        self._optimizers = [*stay, inner]
        self._take_optimizers()
        if not stay:
            self._judge.window.new_rates_from = step

    def also_optimized_by(self, optimizer: Any) -> None:
        """An optimizer that holds some of these parameters, but is watched elsewhere."""
        self._optimizers_elsewhere += optimizer_list(optimizer)

    def compare_ranks(self, step: int) -> list[RankComparison]:
        """The step is made: what has come from all ranks meanwhile, of steps before."""
        return [] if self._ranks is None else self._ranks.end_step(step)

    def wants_digests(self, step: int) -> bool:
        """Whether ranks are compared by checksums at this step."""
        return self._digests is not None and self._digests.wants(step)

    def compare_digests(
        self, step: int, gradients: Sequence[HostCopy], batch: Sequence[HostCopy]
    ) -> list[RankDigests]:
        """The step is made: the comparisons by checksum that have arrived, of steps before."""
        return [] if self._digests is None else self._digests.end_step(step, gradients, batch)

    def judge(self, measured: MeasuredStep) -> list[Finding]:
        """The findings that are new or have changed with this step."""
        window = self._judge.window
        if self._optimizers and window.steps_seen % _MEMBERSHIPS == 0:
            self._take_optimizers()
        if measured.details is not None:
            # Schedulers change them from step to step.
            optimizer = only_optimizer(self._parameters, self._optimizers)
            groups = groups_of(self._optimizers)
            window.subject = replace(window.subject, groups=groups, optimizer=optimizer)
        findings = self._judge.observe(measured)
        for comparison in measured.rank_comparisons:
            findings += self._judge.compare(comparison)
        return findings + self._judge.compare_digests(measured.rank_digests)

    def advised(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return the findings, each with advice for the operation that its diagnosis names."""
        return self._judge.advised(findings)

    def _take_optimizers(self) -> None:
        """Note which parameters the optimizers hold by now."""
        window = self._judge.window
        optimizers = [*self._optimizers, *self._optimizers_elsewhere]
        memberships = memberships_of(self._parameters, optimizers)
        group_of = group_of_rows(self._parameters, self._optimizers)
        window.subject = replace(window.subject, memberships=memberships, group_of=group_of)

    def report(self) -> HealthReport:
        """The verdict so far."""
        return verdict_of(self._judge, self._judge.window.steps_seen)

    def stop(self, patience: float = 0.0) -> None:
        """Take every hook away; wait so many seconds for what other ranks are still sending."""
        if self._ranks is not None:
            self._late += self._ranks.stop(patience)
        if self.early is not None:
            self.early.close()

    def finish(self) -> list[Finding]:
        """The run is over: the last word of every finding that has one."""
        findings = []
        if self._digests is not None:
            findings += self._judge.compare_digests(self._digests.finish())
        for comparison in self._late:
            findings += self._judge.compare(comparison)
        if self.unmoved is not None:
            findings += self._judge.compare_networks(self.unmoved)
        if self.at_end is not None:
            findings += self._judge.failed_on(self.at_end)
        return findings + self._judge.finish()

    def abstentions(self) -> list[Abstention]:
        """The checks that could not judge, and why."""
        return self._judge.abstentions()
