"""Hands every measured step to the store and the sinks."""

from collections.abc import Callable
from typing import Any

from gradsight.core.problems import Problems
from gradsight.measure.histogram import histograms, share_within_a_tenth
from gradsight.measure.norms import combine
from gradsight.measure.update import update_ratios
from gradsight.session.optimizer_steps import NONE
from gradsight.session.step_builder import Measured
from gradsight.store.sinks.queue import SinkQueue
from gradsight.store.store import Store
from gradsight.store.tail_format import pack_statistics
from gradsight.values.steps import block_of

_MANY_PARAMETERS = 500


class Delivery:
    """Where measured steps go."""

    def __init__(
        self,
        names: list[str],
        sink_detail: str | None,
        store: Store | None,
        feed: SinkQueue | None,
        problems: Problems,
        judge: Callable[[Measured], None] | None = None,
        recorder: Callable[[Measured], None] | None = None,
    ) -> None:
        self._names = names
        wanted = sink_detail == "blocks" or (sink_detail is None and len(names) > _MANY_PARAMETERS)
        self._blocks = [block_of(name) for name in names] if wanted else []
        self._store, self._feed, self._problems, self._judge, self._recorder = (
            store,
            feed,
            problems,
            judge,
            recorder,
        )

    def __call__(self, measured: Measured) -> None:
        step = measured.step
        self._problems.step = step.step
        if step.gradient == NONE:
            self._problems.report(
                "no-gradient",
                f"step {step.step}: no parameter of the model has a gradient. The record says so. "
                "Look after backward() and before zero_grad(), at the model that is being trained.",
            )
        everything = len(measured.rows) == len(self._names)
        names = self._names if everything else [self._names[row] for row in measured.rows]
        columns = _columns(measured)
        if self._store is not None:
            packed = b""
            if measured.norms is not None:
                packed = pack_statistics(
                    None if everything else measured.rows, columns, measured.norms.wide
                )
            self._store.add_step(step, self._names, packed)
        if measured.histogram_counters is not None and measured.kept:
            self._deliver_histograms(measured, names)
        if self._feed is not None:
            self._feed.scalars(_shown(measured, names, columns, self._blocks), step.step)
        if self._judge is not None:
            self._judge_it(self._judge, measured)
        if self._recorder is not None:
            self._recorder(measured)

    def _judge_it(self, judge: Callable[[Measured], None], measured: Measured) -> None:
        """A fault of the judge's own ends the judging, not the record."""
        try:
            judge(measured)
        except Exception as error:
            self._judge = None
            self._problems.report(
                "judge", f"Gradsight stopped judging: {type(error).__name__}: {error}"
            )

    def _deliver_histograms(self, measured: Measured, names: list[str]) -> None:
        assert measured.histogram_counters is not None
        number = measured.step.step
        found = histograms(measured.histogram_counters, names, number)
        within = {"gradients/share_within_0.1": share_within_a_tenth(measured.histogram_counters)}
        if self._store is not None:
            self._store.add_histograms(number, found)
            self._store.add_step_scalars(number, within)
        if self._feed is not None:
            self._feed.scalars(within, number)
            for histogram in found:
                if histogram.parameter is None:
                    self._feed.histogram("gradients/histogram", histogram, number)
                elif not self._blocks:
                    self._feed.histogram(
                        f"gradients/{histogram.parameter}/histogram", histogram, number
                    )

    def log_scalar(self, step: int, name: str, value: float) -> None:
        """A number that is not of an optimizer step, but of whatever the caller counts."""
        if self._store is not None:
            self._store.add_scalars(step, {name: value})
        if self._feed is not None:
            self._feed.scalars({name: value}, step)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Scalars of a step that has been made already."""
        if self._store is not None:
            self._store.add_step_scalars(step, values)
        if self._feed is not None:
            self._feed.scalars(values, step)


def _columns(measured: Measured) -> dict[str, Any]:
    """What is stored per parameter: counts only where there is something to count, ratios only
    where they were measured.
    """
    columns: dict[str, Any] = {}
    if measured.norms is not None:
        columns = {"l2": measured.norms.l2, "max_abs": measured.norms.max_abs}
        if measured.norms.counts is not None:
            columns["nan"], columns["inf"] = measured.norms.counts
        if measured.kept and measured.update_sums is not None and measured.update_sums.any():
            columns["update_ratio"], columns["update_ratio_error"] = update_ratios(
                measured.update_sums
            )
    return columns


def _shown(
    measured: Measured, names: list[str], columns: dict[str, Any], blocks: list[str]
) -> dict[str, float]:
    """What sinks get of a step."""
    step = measured.step
    known = {
        "loss": step.loss,
        "lr": step.lr,
        "gradients/total_norm": step.total_norm,
        "gradients/clip_coef": step.clip_coef,
    }
    shown = {name: value for name, value in known.items() if value is not None} | dict(step.scalars)
    if not columns:
        return shown
    if blocks:
        return shown | _block_norms(columns["l2"], [blocks[row] for row in measured.rows])
    shown |= {
        f"gradients/{name}/norm": value
        for name, value in zip(names, columns["l2"].tolist(), strict=True)
    }
    for column, suffix in (("nan", "nan"), ("inf", "inf"), ("update_ratio", "update_ratio")):
        values = columns[column].tolist() if column in columns else ()
        shown |= {
            f"gradients/{name}/{suffix}": value
            for name, value in zip(names, values, strict=False)
            if value and value == value
        }
    return shown


def _block_norms(l2: Any, blocks: list[str]) -> dict[str, float]:
    members: dict[str, list[int]] = {}
    for position, block in enumerate(blocks):
        members.setdefault(block, []).append(position)
    return {
        f"gradients/{block}/norm": float(combine(l2[positions]))
        for block, positions in members.items()
    }
