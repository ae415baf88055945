"""The composer: introduces capture, measure, record and show to each other, and cleans up after
them.
"""

import contextlib
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from gradsight.core import moments as interception
from gradsight.core.group import ProcessGroup, rank, world_size
from gradsight.core.parameters import named_parameters
from gradsight.core.problems import Problems, say
from gradsight.dump.dumper import GradientDumper
from gradsight.dump.under_watch import Dumping
from gradsight.errors import RunError, UsageError
from gradsight.health.instrument import Health
from gradsight.incidents.recorder import SECONDS, Recorder
from gradsight.measure.host_copy import Arrival
from gradsight.session.manual_steps import ManualCapture
from gradsight.session.optimizer_steps import OptimizerCapture, check_optimizers, unwrapped
from gradsight.session.outputs import Delivery
from gradsight.session.shutdown import Ending
from gradsight.session.step_builder import Assembler, take_scalars
from gradsight.store.incidents import with_ranks
from gradsight.store.run_files import write_config
from gradsight.store.sinks import open_sinks
from gradsight.store.sinks.queue import SinkQueue
from gradsight.store.store import Store, open_store
from gradsight.values.health_report import HealthReport
from gradsight.values.steps import Schedule

GRADIENT = "accumulated over micro-batches, reduced over ranks, unscaled, before clipping"
_FAILED = -1
_PATIENCE = 5.0
"""Seconds to wait at the end for what other ranks are still sending, where all of them end
together.
"""
_FORKED = (
    "this process was forked from one that is being recorded; what it trains is not. "
    "To record it too, call gradsight.watch in it, with a run_dir of its own."
)


def watch(
    model: nn.Module,
    optimizer: Any = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    sinks: Iterable[Any] = (),
    stats: Schedule = Schedule(),
    histograms: Schedule = Schedule(step_interval=50),
    health: bool | Mapping[str, Any] | str | os.PathLike[str] = True,
    dump: GradientDumper | None = None,
    recorder: bool | Literal["batch"] = True,
    start_step: int | None = None,
    sink_detail: Literal["parameters", "blocks"] | None = None,
    diagnose_seconds: float = SECONDS,
) -> "Watch":
    """Record what the gradients of a model do while it trains, at next to no cost.

    optimizer: one or several. Each of their steps is then observed by itself, before clipping; several that step in turn make
      one step together. Without one, call `Watch.step()` after backward and before clipping.
    run_dir: where the record goes; None writes nothing to disk. A directory that holds a run is continued.
    sinks: "console", "wandb", "tensorboard", "trackio", or objects with a method log_scalar(name, value, step).
    stats: when norms are recorded. histograms: when histograms and update-to-weight ratios are.
    health: True judges every step; {code: settings}, or a TOML file of such, tunes a check, {code: False} silences it; False
      judges nothing. Findings are in the record and in `Watch.report()`.
    dump: a GradientDumper; its due steps are dumped before clipping, and with dump_on those that are judged so.
    recorder: True diagnoses a NaN or a spike on the spot (which operation, which samples) and writes what led to it to
      `incidents/`, without any of your data; "batch" writes the batch, RNG and parameters too, for `gradsight replay`;
      False does neither.
    start_step: the number of the first step. Recorded steps from there on are replaced. None: after the last recorded one.
    sink_detail: whether sinks get every parameter or blocks of them; None decides by the number of parameters (500).
    diagnose_seconds: how long a diagnosis may hold training up; 0 diagnoses nothing.
    """
    options = (recorder, diagnose_seconds)
    return Watch(
        model,
        optimizer,
        run_dir,
        sinks,
        stats,
        histograms,
        health,
        dump,
        start_step,
        sink_detail,
        *options,
    )


class Watch:
    """A run being recorded. Use `watch(...)`; a context manager, closed at the latest when the
    process ends.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        run_dir: str | os.PathLike[str] | None,
        sinks: Iterable[Any],
        stats: Schedule,
        histogram_schedule: Schedule,
        health: bool | Mapping[str, Any] | str | os.PathLike[str],
        dump: GradientDumper | None,
        start_step: int | None,
        sink_detail: str | None,
        recorder: bool | str = True,
        diagnose_seconds: float = SECONDS,
    ) -> None:
        optimizers = self._optimizers = check_optimizers(optimizer)
        self._parameters = _check_model(model)
        self._names = [parameter.name for parameter in self._parameters]
        _check_detail(sink_detail)
        _check_recorder(recorder, diagnose_seconds)
        self._problems = Problems()
        self._store: Store | None = None
        self._feed: SinkQueue | None = None
        self._closed = self._forked = False
        self._run_dir = None if run_dir is None else Path(run_dir).resolve()
        self._health = (
            None if health is False else Health(model, self._parameters, optimizers, health)
        )
        self._group = ProcessGroup() if world_size() > 1 else None
        first_step = self._open_record(run_dir, sinks, start_step)
        judge = self._health
        self._recorder: Recorder | None = None
        if recorder is not False:
            settings = (
                recorder,
                diagnose_seconds,
                self._names,
                run_dir,
                judge,
                self._problems,
                len(optimizers),
            )
            self._recorder = Recorder(model, *settings)
        told = self._recorder.delivered if self._recorder is not None else None
        self._deliver = Delivery(
            self._names, sink_detail, self._store, self._feed, self._problems, judge, told
        )
        tensors = [parameter.tensor for parameter in self._parameters]
        self._dumping = (
            Dumping(dump, model, len(optimizers), self._problems) if dump is not None else None
        )
        companions = [
            companion for companion in (self._dumping, self._recorder) if companion is not None
        ]
        self._assembler = Assembler(
            tensors,
            stats,
            histogram_schedule,
            first_step,
            self._group,
            self._deliver,
            self._failed,
            companions,
        )
        if judge is not None:
            judge.begin(first_step, self._store)
            judge.on_finding = [companion.judged for companion in companions]
            if self._group is not None:
                judge.compare_ranks(self._group, self._problems.report)
            self._assembler.serve(judge.looks_closer, judge.units, judge.notes)
        self._capture: OptimizerCapture | ManualCapture
        if optimizers:
            self._capture = OptimizerCapture(model, tensors, optimizers, self._assembler)
        else:
            self._capture = ManualCapture(model, tensors, self._assembler)
        self._ending = Ending(
            lambda: self._close(wait=False), self._let_go, self._asked_to_end, self._ended_by
        )
        if self._store is not None:
            used: dict[str, Any] = {
                "stats": stats,
                "histograms": histogram_schedule,
                "start_step": first_step,
            }
            used |= {
                "sink_detail": sink_detail,
                "recorder": recorder,
                "diagnose_seconds": diagnose_seconds,
            }
            used["health"] = os.fspath(health) if isinstance(health, os.PathLike) else health
            write_config(self._store.path, _config(used, self._parameters, optimizers))
        self._capture.start()
        if self._recorder is not None:
            self._recorder.start()
        if judge is not None:
            judge.vitals.start()

    def step(self, step: int | None = None, **scalars: Any) -> None:
        """The gradient is in place, not yet clipped: record it, go on to the next step. For loops
        without a watched optimizer.

        step: your own number for this step; steps only go forward.
        """
        if isinstance(self._capture, OptimizerCapture):
            self._problems.report(
                "step-by-hand",
                "Watch.step() does nothing beside a watched optimizer but log: its steps are counted already",
            )
            self.log(**scalars)
            return
        if step is not None:
            if step < self._assembler.step:
                raise UsageError(
                    f"steps only go forward: step {step} after step {self._assembler.step - 1}. "
                    f"To record steps again, open the run with start_step={step}."
                )
            self._assembler.jump_to(step)
        if self._forked:
            self._problems.report("forked", _FORKED)
        if not self._closed:
            self._assembler.log(take_scalars(scalars))
            self._capture.step()

    def ids(self, sample_ids: Sequence[int | str] | torch.Tensor) -> None:
        """What the samples of the next call of the model are called: a diagnosis then names them
        so, not by their row.
        """
        if self._recorder is not None and not self._closed:
            self._recorder.calls.name_samples(sample_ids)

    def log(self, **scalars: Any) -> None:
        """Add loss=, lr= or anything else to the current step: the one under way, or the one just
        made if none has begun.
        """
        values = take_scalars(scalars)
        if self._closed or not values:
            return
        if self._assembler.begun:
            self._assembler.log(values)
        else:
            self._deliver.log(
                self._assembler.step - 1, {name: _value(value) for name, value in values.items()}
            )

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """One number under a step of the caller's, as trackers take it: a watch is a tracker too."""
        if not self._closed and rank() == 0:
            self._deliver.log_scalar(step, name, float(value))

    @property
    def current_step(self) -> int:
        """The number of the step under way."""
        return self._assembler.step

    def know(self, optimizer: Any) -> None:
        """An optimizer that holds some of these parameters, but is watched elsewhere: what it holds
        is not missing.
        """
        if self._health is not None:
            self._health.elsewhere += check_optimizers(optimizer)

    def report(self) -> HealthReport:
        """The Gradient Health Report of the run so far; under ranks, rank 0 has it."""
        if self._health is None:
            raise UsageError("this watch judges nothing: it was opened with health=False")
        if not self._closed:
            self._assembler.flush()
        report = self._health.report()
        return (
            report
            if self._run_dir is None
            else replace(report, findings=tuple(with_ranks(self._run_dir, report.findings)))
        )

    def close(self) -> None:
        """Write what is left, take every hook away. Closing again does nothing."""
        self._close(wait=True)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if error is not None:
            self._ended_by(error)
        self._close(wait=kind is None)

    def _ended_by(self, error: BaseException) -> None:
        """An exception ends the run: the flight recorder writes down how things stood."""
        if self._recorder is not None and not self._closed:
            self._recorder.failed(self._assembler.step, error)

    def _asked_to_end(self) -> None:
        if self._recorder is not None and not self._closed:
            self._recorder.asked_to_end(self._assembler.step)

    def _close(self, wait: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._capture.stop()
        if self._health is not None:
            self._health.stop(_PATIENCE if wait else 0.2)
        self._ending.cancel()
        if self._recorder is not None:
            self._recorder.calls.stop()
        if self._dumping is not None:
            with self._survives("dumps"):
                self._dumping.close()
        with self._survives("closing"):
            self._assembler.close(wait)
            if wait and self._group is not None:
                self._group.close()
        if self._health is not None:
            with self._survives("judging"):
                self._health.finish()
        if self._recorder is not None:
            with self._survives("recorder"):
                self._recorder.stop()
        if self._feed is not None:
            with self._survives("sinks"):
                self._feed.close()
        if self._store is not None:
            with self._survives("store"):
                self._store.recording = False
                self._store.close()

    def _let_go(self) -> None:
        """In a forked child: the record is the parent's. Whoever trains on here is told that
        nothing of it is recorded.
        """
        self._closed = self._forked = True
        interception.renew_lock()
        self._capture.stop()
        if self._recorder is not None:
            self._recorder.calls.stop()
        if self._health is not None:
            self._health.stop(patience=0)
        for optimizer in self._optimizers:
            _say_at_next_step(optimizer, _FORKED)

    # Opening.

    def _open_record(
        self, run_dir: str | os.PathLike[str] | None, sinks: Iterable[Any], start_step: int | None
    ) -> int:
        """Open store and sinks, on rank 0; tell the first step, on all ranks."""
        if start_step is not None and start_step < 0:
            raise UsageError(f"start_step must be 0 or more, got {start_step}")
        if self._group is None:
            return self._open_on_first_rank(run_dir, sinks, start_step)
        first = _FAILED
        try:
            if rank() == 0:
                first = self._open_on_first_rank(run_dir, sinks, start_step)
        finally:
            first = self._group.from_first(first)
        if first == _FAILED:
            raise RunError("rank 0 could not open the run; its own error says why")
        return first

    def _open_on_first_rank(
        self, run_dir: str | os.PathLike[str] | None, sinks: Iterable[Any], start_step: int | None
    ) -> int:
        first = start_step or 0
        try:
            if run_dir is not None:
                self._store = open_store(run_dir)
                self._problems = self._store.problems
                if self._store.recording:
                    raise UsageError(
                        f"this process is already recording steps into {run_dir}; give each watch its own run_dir"
                    )
                if start_step is None:
                    last = self._store.last_step()
                    first = 0 if last is None else last + 1
                else:
                    self._store.forget_from(first)
                self._store.recording = True
            opened = open_sinks(sinks, self._store.path if self._store else None)
            if opened:
                self._feed = SinkQueue(opened, self._problems)
        except BaseException:
            if self._store is not None:
                self._store.close()
            raise
        return first

    def _failed(self, error: Exception) -> None:
        """A fault of ours: training goes on without us."""
        self._capture.stop()
        if self._recorder is not None:
            self._recorder.calls.stop()
        if self._health is not None:
            self._health.stop()
        where = _place(error)
        self._problems.report(
            "capture",
            f"Gradsight stopped looking at gradients: {type(error).__name__}: {error} ({where})",
        )

    @contextlib.contextmanager
    def _survives(self, what: str) -> Any:
        try:
            yield
        except Exception as error:
            self._problems.report(what, f"{what} failed: {type(error).__name__}: {error}")


def _say_at_next_step(optimizer: Any, message: str) -> None:
    def stepped(*_: Any) -> None:
        handle.remove()
        say(message)

    handle = unwrapped(optimizer).register_step_post_hook(stepped)


def _check_model(model: nn.Module) -> list[Any]:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    parameters = named_parameters(model)
    if not any(parameter.tensor.requires_grad for parameter in parameters):
        what = (
            "no parameters"
            if not parameters
            else f"{len(parameters)} parameters, all of them frozen"
        )
        raise UsageError(
            f"{type(model).__name__} has nothing to watch: {what}. Set requires_grad on what is to be trained."
        )
    return parameters


def _check_detail(detail: str | None) -> None:
    if detail not in (None, "parameters", "blocks"):
        raise UsageError(f"sink_detail must be 'parameters' or 'blocks', got {detail!r}")


def _check_recorder(recorder: bool | str, seconds: float) -> None:
    if recorder not in (True, False, "batch"):
        raise UsageError(f'recorder must be True, False or "batch", got {recorder!r}')
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise UsageError(f"diagnose_seconds must be 0 or more, got {seconds!r}")


def _config(
    settings: dict[str, Any], parameters: list[Any], optimizers: list[Any]
) -> dict[str, Any]:
    plain = {
        name: _fields(value) if isinstance(value, Schedule) else value
        for name, value in settings.items()
    }
    described = [parameter.describe() for parameter in parameters]
    return {
        "settings": {"watch": plain},
        "versions": {
            "gradsight": metadata.version("gradsight"),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "started": time.time(),
        "world_size": world_size(),
        "gradient": GRADIENT,
        "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
        "parameters": [_fields(parameter) for parameter in described],
    }


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def _value(value: float | Arrival) -> float:
    return float(value.read()[0]) if isinstance(value, Arrival) else value


def _place(error: Exception) -> str:
    """Where an error of ours came from, for the message."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (
        f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        if trace is not None
        else "unknown place"
    )
