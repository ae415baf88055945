"""Where finished steps go: the record in the run directory, and the sinks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from gradsight.core.parameters import Named
from gradsight.measure.groups import by_block, by_module
from gradsight.session.shutdown import close_first_at_exit
from gradsight.store.sinks.queue import SinkQueue
from gradsight.store.store import Store
from gradsight.store.tail_format import OPTIONAL, pack_statistics
from gradsight.values.findings import Finding
from gradsight.values.first_step import LABEL_SHARE
from gradsight.values.health_report import Abstention
from gradsight.values.measured import Floats, MeasuredStep

_MANY_PARAMETERS = 500
"""From here on sinks get blocks: hundreds of charts are of no use to anybody."""
_WITHIN = "gradients/share_within_0.1"
_HISTOGRAM = "gradients/histogram"


class RecordOutput:
    """Writes steps to the run directory."""

    title = "the record"

    def __init__(self, store: Store, names: Sequence[str], first_step: int) -> None:
        self._store = store
        self._names = names
        self._first_step = first_step

    def write(self, measured: MeasuredStep, findings: Sequence[Finding]) -> None:
        """One step, and every finding that is new or has changed."""
        packed = b""
        if measured.norms is not None:
            columns = parameter_columns(measured)
            packed = pack_statistics(measured.rows, columns, measured.norms.wide)
        number = measured.step.step
        self._store.add_step(measured.step, self._names, packed)
        details = measured.details
        if details is not None and details.recorded:
            self._store.add_histograms(number, details.histograms)
            if details.share_within_a_tenth is not None:
                self._store.add_step_scalars(number, {_WITHIN: details.share_within_a_tenth})
            if measured.experts:
                self._store.add_experts(number, measured.experts)
        share = None if measured.signals.first is None else measured.signals.first.label_share
        if share is not None and share != 1:
            self._store.add_step_scalars(number, {LABEL_SHARE: share})
        for finding in findings:
            self._store.add_finding(finding)

    def finish(self, findings: Sequence[Finding], abstained: Sequence[Abstention]) -> None:
        """The run is over: the last word of its findings, and the checks that could not judge."""
        for finding in findings:
            self._store.add_finding(finding)
        for each in abstained:
            self._store.add_record("abstention", each.code, self._first_step, asdict(each))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of a step that has been made already."""
        self._store.add_step_scalars(step, values)

    def log_scalar(self, step: int, name: str, value: float) -> None:
        """A number of the step that is under way, or was just made."""
        self._store.add_scalars(step, {name: value})

    def log_tracked(self, step: int, name: str, value: float) -> None:
        """A number under a count of the caller's own: kept apart from the steps."""
        self._store.add_tracked(step, {name: value})


class SinkOutput:
    """Shows steps in other trackers: parameters and modules, or blocks where there are many."""

    title = "the sinks"

    def __init__(self, queue: SinkQueue, parameters: Sequence[Named], detail: str | None) -> None:
        self._queue = queue
        self._names = [parameter.name for parameter in parameters]
        many = len(parameters) > _MANY_PARAMETERS
        self._by_blocks = detail == "blocks" or (detail is None and many)
        if self._by_blocks:
            self._groups = by_block(self._names)
        else:
            self._groups = by_module([parameter.names for parameter in parameters])

    def write(self, measured: MeasuredStep, findings: Sequence[Finding]) -> None:
        """One step. Sinks are told numbers, no findings."""
        scalars = self._scalars(measured)
        histograms = {}
        details = measured.details
        if details is not None and details.recorded:
            if details.share_within_a_tenth is not None:
                scalars[_WITHIN] = details.share_within_a_tenth
            scalars |= _expert_scalars(measured.experts)
            for histogram in details.histograms:
                if histogram.parameter is None:
                    histograms[_HISTOGRAM] = histogram
                    scalars[f"{_HISTOGRAM}_outside"] = histogram.outside_share
                elif not self._by_blocks:
                    histograms[f"gradients/{histogram.parameter}/histogram"] = histogram
        self._start()
        self._queue.write(measured.step.step, scalars, histograms)

    def finish(self, findings: Sequence[Finding], abstained: Sequence[Abstention]) -> None:
        """The run is over. Sinks are told numbers, no findings."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of a step that has been made already."""
        self._start()
        self._queue.log(step, values)

    def log_scalar(self, step: int, name: str, value: float) -> None:
        """A number of the step that is under way, or was just made."""
        self.log(step, {name: value})

    def log_tracked(self, step: int, name: str, value: float) -> None:
        """A number under a count of the caller's own: a sink has but one."""
        self.log(step, {name: value})

    def _start(self) -> None:
        # Not earlier: by now the user has opened a run of their own, if there is to be one.
        if self._queue.start():
            close_first_at_exit()

    def _scalars(self, measured: MeasuredStep) -> dict[str, float]:
        step = measured.step
        known = {
            "loss": step.loss,
            "lr": step.lr,
            "gradients/total_norm": step.total_norm,
            "gradients/clip_coef": step.clip_coef,
        }
        shown = {name: value for name, value in known.items() if value is not None}
        shown |= step.scalars
        if measured.norms is None:
            return shown
        for name, value in self._groups.of(measured.norms.l2, measured.rows).items():
            shown[f"gradients/{name}/norm"] = value
        if self._by_blocks:
            return shown
        rows = range(len(self._names)) if measured.rows is None else measured.rows
        names = [self._names[row] for row in rows]
        columns = parameter_columns(measured)
        for name, value in zip(names, columns["l2"].tolist(), strict=True):
            shown[f"gradients/{name}/norm"] = value
        for column in ("nan", "inf", *sorted(OPTIONAL)):
            if column in columns and not column.endswith("_error"):
                for name, value in zip(names, columns[column].tolist(), strict=True):
                    if value and value == value:
                        shown[f"{_place_of(column)}/{name}/{column}"] = value
        return shown


def _expert_scalars(experts: Mapping[str, Floats]) -> dict[str, float]:
    """How many experts of each group have no gradient, and the norm of each where they are few."""
    scalars: dict[str, float] = {}
    few = sum(len(norms) for norms in experts.values()) <= _MANY_PARAMETERS
    for group, norms in experts.items():
        scalars[f"experts/{group}/without_gradient"] = float((norms == 0).sum())
        if few:
            for expert, norm in enumerate(norms.tolist()):
                scalars[f"experts/{group}/{expert}/norm"] = norm
    return scalars


def _place_of(column: str) -> str:
    """Where trackers show a column: what is of the weights does not stand among gradients."""
    return "weights" if column in ("weight_rms", "update_rms") else "gradients"


def parameter_columns(measured: MeasuredStep) -> dict[str, Floats]:
    """The numbers of every parameter with a gradient, by the fields of `ParameterStat`.

    Counts only where there is something to count, details only where they were measured.
    """
    norms = measured.norms
    if norms is None:
        return {}
    columns = {"l2": norms.l2, "max_abs": norms.max_abs}
    if norms.counts is not None:
        columns["nan"] = norms.counts[0]
        columns["inf"] = norms.counts[1]
    details = measured.details
    if details is not None and details.recorded:
        rows = slice(None) if measured.rows is None else list(measured.rows)
        for name in OPTIONAL:
            values = details[name][rows]
            # A column that was not measured takes no bytes in the record.
            if not np.isnan(values).all():
                columns[name] = values
    return columns
