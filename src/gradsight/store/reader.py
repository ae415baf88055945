"""Reads a run, also while it is being written. No torch."""

import heapq
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gradsight.core import limits, rundir
from gradsight.core.documents import load_object
from gradsight.core.records import read_record
from gradsight.errors import RunError, UsageError, WrongPlace
from gradsight.store import tail_format as frames
from gradsight.store.incidents import read_incidents, with_ranks
from gradsight.store.record_view import RecordView, Row
from gradsight.store.run_files import read_run_config
from gradsight.store.run_listing import runs_in
from gradsight.store.score_problems import score_problems
from gradsight.store.scores import each_step_once, readable_scores, score_files, step_after
from gradsight.store.stat_chunks import StatChunk, stat_chunks
from gradsight.store.tables import PackedStats, records_table, stats_table
from gradsight.values.causes import with_causes
from gradsight.values.diagnoses import Incident
from gradsight.values.experts import ExpertStat
from gradsight.values.findings import Finding, Problem
from gradsight.values.health_report import SEVERITIES, Abstention, counted_causes
from gradsight.values.histograms import Histogram
from gradsight.values.notebook import html_card
from gradsight.values.plain import counted, nearest
from gradsight.values.scores import SampleScore
from gradsight.values.steps import Cost, ParameterStat, Scalar, Step

if TYPE_CHECKING:
    import pyarrow


T = TypeVar("T")
_NOTHING: Mapping[str, float] = {}
"""The scalars of a step that has none: one for all, as millions of steps have none."""

_KINDS: dict[str, type] = {
    "steps": Step,
    "histograms": Histogram,
    "scalars": Scalar,
    "findings": Finding,
    "memory": Scalar,
    "incidents": Incident,
    "expert_stats": ExpertStat,
    "problems": Problem,
}
"""The records that a table is made of, by the method that gives them."""


def open_run(run_dir: str | os.PathLike[str]) -> "Run":
    """A run directory for reading: live, killed or closed, also where nothing may be written.

    run_dir: the directory that `watch` was given.
    """
    path = rundir.directory_path(run_dir, "run_dir")
    try:
        is_folder = path.is_dir()
    except OSError as error:
        raise WrongPlace(f"{path} cannot be read: {error.strerror}") from error
    if not is_folder:
        raise WrongPlace(f"there is no run directory at {path}")
    file = path / rundir.RECORD
    if not file.is_file():
        inside = list(runs_in(path))
        if inside:
            raise WrongPlace(
                f"{path} is a folder of {counted(len(inside), 'run')}, not a run directory: give "
                f"one of them, such as {path / inside[0]}. To see them all: gradsight serve {path}"
            )
        raise WrongPlace(f"{path} is not a run directory: it has no {rundir.RECORD}")
    return Run(path)


class Run:
    """A recorded run. Every method gives an iterator of frozen records, in the order of steps.

    Each looks at what has been written until it is called; nothing in the run directory is changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._view = RecordView(path)

    @property
    def config(self) -> dict[str, Any]:
        """What config.json says; empty where there is none."""
        return read_run_config(self.path)

    def refresh(self) -> bool:
        """Look at what was written meanwhile; tell whether there was anything.

        Costs next to nothing where there was not. Whoever is reading goes on with what there was.
        """
        if self._view.is_replaced():
            self._view = RecordView(self.path)
            return True
        return self._view.read_tail()

    def next_step(self) -> int:
        """The step after the last one that was recorded or scored."""
        self.refresh()
        return step_after(self._view.last_step(), self.path)

    def steps(self, after: int = -1) -> Iterator[Step]:
        """Every optimizer step; with `after`, those after this one."""
        self.refresh()
        scalars = self._scalars_by_step(after)
        upcoming = next(scalars, None)
        for row in self._view.rows("steps", after):
            step, time, loss, lr, total_norm, clip_coef, scale, skipped, gradient = row
            # A step that was only logged to has no time yet: it has not been made.
            if time is None:
                continue
            # Both come in the order of steps, so that neither has to be held in memory as a whole.
            while upcoming is not None and upcoming[0] < step:
                upcoming = next(scalars, None)
            extra: Mapping[str, float] = _NOTHING
            if upcoming is not None and upcoming[0] == step:
                extra = upcoming[1]
            yield Step(
                step=step,
                time=time,
                loss=loss,
                lr=lr,
                total_norm=total_norm,
                clip_coef=clip_coef,
                scale=scale,
                skipped=bool(skipped),
                gradient=gradient or "",
                scalars=extra,
            )

    def parameter_stats(self, parameter: str | None = None) -> Iterator[ParameterStat]:
        """The gradient of every parameter (or of one) at every step."""
        if parameter is not None:
            self.refresh()
            recorded = [name for names in _layouts(self._view).values() for name in names]
            self._refuse_unknown(parameter, recorded)
        return self._stats(parameter)

    def _stats(self, parameter: str | None) -> Iterator[ParameterStat]:
        for step, names, packed in self._packed_stats():
            for stat in frames.statistics(step, names, packed):
                if parameter is None or stat.parameter == parameter:
                    yield stat

    def stat_chunks(self, after: int = -1) -> Iterator[StatChunk]:
        """The same as arrays, many steps at once: for runs too long for a record per number.

        after: only of the steps after this one.
        """
        return stat_chunks(self._packed_stats(after))

    def expert_stats(self) -> Iterator[ExpertStat]:
        """The gradient of every expert of a mixture, on the steps of the histograms' schedule."""
        for step, group, norms in self.expert_looks():
            for expert, norm in enumerate(norms):
                yield ExpertStat(step, group, expert, norm)

    def expert_looks(self) -> Iterator[tuple[int, str, list[float]]]:
        """The same as lists: step, group, and the norm of each expert."""
        self.refresh()
        for step, group, packed in self._view.rows("experts"):
            yield step, group, frames.load_experts(packed)

    def measured_steps(self) -> list[int]:
        """The steps that have statistics of parameters."""
        self.refresh()
        return self._view.steps_in("stats")

    def measured_parameters(self) -> list[str]:
        """The names that statistics are recorded under, in the model's own order."""
        self.refresh()
        layouts = _layouts(self._view).values()
        recorded = dict.fromkeys(name for names in layouts for name in names)
        known = [name for name in self._parameters() if name in recorded]
        # What the settings do not name stands in the order in which it was measured.
        return list(dict.fromkeys([*known, *recorded]))

    def histogram_steps(self) -> list[int]:
        """The steps at which a watch counted the gradients' entries."""
        self.refresh()
        return self._view.steps_in("histograms", "source = ''")

    def histograms_at(self, steps: Iterable[int]) -> Iterator[Histogram]:
        """All histograms of some of these steps: to read every one of a long run takes long.

        It ends early where they are more than a report can take.
        """
        rows = (row for wanted in steps for row in self._view.rows_at("histograms", wanted))
        watched = (row for row in rows if not row[1])
        yield from itertools.islice(_unpacked(watched), limits.HISTOGRAMS)

    def histograms(self, parameter: str | None = "*") -> Iterator[Histogram]:
        """All histograms, those of one parameter, or (None) those over all parameters together."""
        if parameter not in ("*", None, *self._parameters()):
            # Trackers name theirs as they like: only the histograms themselves know.
            recorded = {str(each.parameter) for each in self._histograms("*")}
            self._refuse_unknown(parameter, sorted(recorded))
        return self._histograms(parameter)

    def _histograms(self, parameter: str | None) -> Iterator[Histogram]:
        self.refresh()
        found = _unpacked(self._view.rows("histograms"), has_end=parameter is None)
        for histogram in found:
            if parameter in ("*", histogram.parameter):
                yield histogram

    def _parameters(self) -> list[str]:
        """The parameters that the run was opened with."""
        described = self.config.get("parameters", ())
        if not isinstance(described, list):
            return []
        names = [each.get("name") for each in described if isinstance(each, dict)]
        return [name for name in names if isinstance(name, str)]

    def _refuse_unknown(self, parameter: object, recorded: Sequence[str]) -> None:
        """A name that the run does not know would give nothing, as a clean parameter does."""
        known = list(dict.fromkeys([*self._parameters(), *recorded]))
        if parameter not in known:
            near = nearest(str(parameter), known)
            raise UsageError(f"{self.path} has no parameter named {parameter!r}; {near}")

    def scalars(self, name: str | None = None) -> Iterator[Scalar]:
        """Whatever was logged by name, apart from loss and lr, which are in the steps.

        Also what trackers were given: their steps are their own, and their source says so.
        """
        self.refresh()
        watched = self._scalars("scalars", "watch")
        tracked = self._scalars("tracked", "tracker")
        for scalar in heapq.merge(watched, tracked, key=lambda each: (each.step, each.name)):
            if name is None or scalar.name == name:
                yield scalar

    def findings(self) -> Iterator[Finding]:
        """What the health instrument judged."""
        findings = [self._record(Finding, row) for row in self._records("finding")]
        for finding in findings:
            if finding.severity not in SEVERITIES:
                raise self._damaged(f"a finding has the severity {finding.severity!r}")
        yield from with_causes(with_ranks(self.path, findings))

    def problems(self) -> Iterator[Problem]:
        """Faults of Gradsight's own that training survived, and score files that are not whole."""
        for row in self._records("problem"):
            yield self._record(Problem, row)
        yield from score_problems(self.path)

    def abstentions(self) -> Iterator[Abstention]:
        """The checks that could not judge this run, and why."""
        for row in self._records("abstention"):
            yield self._record(Abstention, row)

    def cost(self) -> Cost | None:
        """What the watch took of the training; None of runs that did not record it."""
        for row in self._records("cost"):
            return self._record(Cost, row)
        return None

    def memory(self) -> Iterator[Scalar]:
        """The memory monitor's numbers, and those of verifying activation checkpointing."""
        for scalar in self.scalars():
            if scalar.name.startswith(("memory/", "checkpointing/")):
                yield scalar

    def scores(self) -> Iterator[SampleScore]:
        """Every training sample's score, as the ghost engine saved them."""
        # File by file: all scores of a long run would not fit into memory as records.
        for table in each_step_once(self.path):
            for row in table.to_pylist():
                yield SampleScore(**row)

    def score_table(self) -> "tuple[pyarrow.Table, list[str]] | None":
        """All scores as a table, and what to say of unreadable files; None without any scores."""
        if not score_files(self.path):
            return None
        return readable_scores(self.path)

    def incidents(self) -> Iterator[Incident]:
        """The flight recorder's bundles."""
        return iter(read_incidents(self.path))

    def to_arrow(self, name: str) -> "pyarrow.Table":
        """The records of one kind as a table with the same columns."""
        if name == "parameter_stats":
            return stats_table(self._packed_stats())
        if name == "scores":
            table, unreadable = readable_scores(self.path)
            if unreadable:
                raise RunError(unreadable[0])
            return table
        if name not in _KINDS:
            known = ", ".join(sorted([*_KINDS, "parameter_stats", "scores"]))
            raise UsageError(f"a run has no table {name!r}; it has {known}")
        return records_table(_KINDS[name], getattr(self, name)())

    def _repr_html_(self) -> str:
        """For notebooks: how long the run is, and what was found."""
        findings = list(self.findings())
        rows = [
            (finding.code, finding.name, finding.severity, finding.first_step, finding.evidence)
            for finding in findings
        ]
        after = self.next_step()
        extent = f"steps up to {after - 1}" if after else "no steps"
        title = f"{self.path.name}: {extent}, {counted_causes(findings)}"
        headings = ("code", "finding", "severity", "since step", "evidence")
        return html_card(title, rows, headings, "gradsight report --open shows every layer")

    def close(self) -> None:
        """Close the file."""
        self._view.close()

    def _records(self, kind: str) -> list[Row]:
        self.refresh()
        return self._view.records(kind)

    def _record(self, kind: type[T], row: Row) -> T:
        """A record out of its JSON."""
        key, _, value = row
        name = f"{self.path / rundir.RECORD}: the {kind.__name__.lower()} {key!r}"
        return read_record(kind, load_object(value.encode(), name), name)

    def _scalars(self, table: str, source: str, after: int = -1) -> Iterator[Scalar]:
        for step, logged, value in self._view.rows(table, after):
            yield Scalar(step, logged, 0.0 if value is None else value, source)

    def _scalars_by_step(self, after: int) -> Iterator[tuple[int, dict[str, float]]]:
        # Trackers count epochs, or what they like: none of it is of an optimizer step.
        logged = self._scalars("scalars", "watch", after)
        for step, scalars in itertools.groupby(logged, key=lambda scalar: scalar.step):
            yield step, {scalar.name: scalar.value for scalar in scalars}

    def _packed_stats(self, after: int = -1) -> Iterator[PackedStats]:
        self.refresh()
        # Kept, so that what is read and its layouts are of the same moment.
        view = self._view
        layouts = _layouts(view)
        for step, layout, packed in view.rows("stats", after):
            if layout not in layouts:
                # A run that is being written can get another layout while it is read.
                layouts = _layouts(view)
            if layout not in layouts:
                raise self._damaged(f"step {step} has an unknown layout {layout}")
            yield step, layouts[layout], packed

    def _damaged(self, what: str) -> RunError:
        return RunError(f"{self.path / rundir.RECORD} is damaged: {what}")


def _unpacked(rows: Iterable[Row], has_end: bool = True) -> Iterator[Histogram]:
    """The histograms of packed rows.

    has_end: a report asks for them, and must come to an end, whatever they unpack to.
    """
    left = limits.HISTOGRAMS_BYTES
    for step, name, packed in rows:
        text = frames.histogram_text(step, packed)
        left -= len(text)
        if has_end and left < 0:
            return
        yield from frames.load_histograms(step, text, "tracker" if name else "watch")


def _layouts(view: RecordView) -> dict[int, list[str]]:
    """The lists of parameter names by number."""
    layouts = {}
    size = 0
    for number, names in view.rows("layouts"):
        size += len(names)
        if size > limits.DOCUMENT_BYTES:
            raise RunError("the lists of parameters are longer than any of ours")
        layouts[number] = frames.load_names(names)
    return layouts
