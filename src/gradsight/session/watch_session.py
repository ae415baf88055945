"""A watched run: puts the parts of a session together, and takes them apart again."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from gradsight.core import moments
from gradsight.core.group import ProcessGroup, rank, world_size
from gradsight.core.optimizers import innermost_optimizer
from gradsight.core.parameters import Named
from gradsight.core.problems import say
from gradsight.core.watched_steps import WatchedSteps, count_steps_of, stop_counting
from gradsight.dump.dumper import GradientDumper
from gradsight.dump.under_watch import WatchedDumps
from gradsight.errors import UsageError
from gradsight.health.health import Health, HealthOptions
from gradsight.health.judge import checks_at_work
from gradsight.health.registry import CheckSettings
from gradsight.incidents.recorder import SECONDS, FlightRecorder, RecorderOptions
from gradsight.session.first_critical import FirstCritical
from gradsight.session.line import StepLine, WatchedInstruments
from gradsight.session.manual_steps import ManualSteps
from gradsight.session.missing_steps import MissingSteps
from gradsight.session.opening import OpenedRun, open_run_outputs, write_run_config
from gradsight.session.optimizer_steps import OptimizerSteps
from gradsight.session.options import WatchOptions, sinks_given
from gradsight.session.readings import arrived, take_scalars
from gradsight.session.shutdown import ShutdownHooks
from gradsight.session.signals import TrainingSignals
from gradsight.session.step_builder import MeasuringPlan, StepBuilder
from gradsight.session.subjects import watched_optimizers, watched_parameters
from gradsight.store.incidents import with_ranks
from gradsight.values.health_report import HealthReport
from gradsight.values.steps import CloserLooks, Schedule
from gradsight.values.whole_numbers import single_number, whole_number

_PATIENCE = 5.0
"""Seconds to wait at the end for what other ranks are still sending, where all end together."""
_SHORT_PATIENCE = 0.2
_FORKED = (
    "this process was forked from one that is being recorded; what it trains is not. "
    "To record it too, call gradsight.watch in it, with a run_dir of its own."
)

_CLOSED = "this watch is closed: what it is told from now on is not recorded"


def watch(
    model: nn.Module,
    optimizer: object = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    sinks: Iterable[object] = (),
    stats: Schedule = Schedule(),
    histograms: Schedule = Schedule(step_interval=50),
    health: bool | Mapping[str, object] | str | os.PathLike[str] = True,
    dump: GradientDumper | None = None,
    recorder: bool | Literal["batch"] = True,
    start_step: int | None = None,
    sink_detail: Literal["parameters", "blocks"] | None = None,
    diagnose_seconds: float = SECONDS,
    quiet: bool = False,
) -> "Watch":
    """Record what the gradients of a model do while it trains, at next to no cost.

    model: the module that is trained, inside any wrapper.
    optimizer: one or several. Each of their steps is then observed by itself, before clipping;
      several that step in turn make one step together. Without one, call `Watch.step()` after
      backward and before clipping.
    run_dir: where the record goes; None writes nothing to disk. A directory that holds a run is
      continued.
    sinks: "console", "wandb", "tensorboard", "trackio", or objects with a method
      log_scalar(name, value, step).
    stats: when norms are recorded.
    histograms: when histograms and update-to-weight ratios are recorded.
    health: True judges every step; {code: settings}, or a TOML file of such, tunes a check,
      {code: False} silences it; False judges nothing. Findings are in the record and in
      `Watch.report()`.
    dump: a GradientDumper; its due steps are dumped before clipping, and with dump_on those that
      are judged so.
    recorder: True diagnoses a NaN or a spike on the spot (which operation, which samples) and
      writes what led to it to `incidents/`, without any of your data; "batch" writes the batch, RNG
      and parameters too, for `gradsight replay`; False does neither.
    start_step: the number of the first step. Recorded steps from there on are replaced. None: after
      the last recorded one.
    sink_detail: whether sinks get every parameter or blocks of them; None decides by the number of
      parameters (500).
    diagnose_seconds: how long a diagnosis may hold training up; 0 diagnoses nothing.
    quiet: whether to say nothing on standard error. Otherwise one line says that an old run is
      continued, and one line the first critical finding: step, code, cause, and where to read on.
    """
    options = WatchOptions(
        run_dir=run_dir,
        sinks=sinks_given(sinks),
        stats=stats,
        histograms=histograms,
        health=health,
        dump=dump,
        recorder=recorder,
        start_step=start_step,
        sink_detail=sink_detail,
        diagnose_seconds=diagnose_seconds,
        quiet=quiet,
    )
    return Watch(model, optimizer, options)


class Watch:
    """A run being recorded.

    Use `watch(...)`; a context manager, closed at the latest when the process ends.
    """

    def __init__(self, model: nn.Module, optimizer: object, options: WatchOptions) -> None:
        parameters = watched_parameters(model)
        self._optimizers = watched_optimizers(optimizer, model, parameters)
        # Wrong settings are an error before anything is opened.
        checks = None if options.health is False else checks_at_work(options.health)
        self._closed = False
        self._forked = False
        self._run_dir = None if options.run_dir is None else Path(options.run_dir).resolve()
        self._group = ProcessGroup() if world_size() > 1 else None
        self._opened = open_run_outputs(options, parameters, self._group)
        self._problems = self._opened.problems
        self._outputs = self._opened.outputs(parameters, options.sink_detail)
        if rank() == 0 and not options.quiet:
            self._outputs.append(FirstCritical(options.run_dir))
        self._instruments = self._make_instruments(model, parameters, options, checks)
        plan = _measuring_plan(options, self._opened, self._instruments)
        self._line = StepLine(
            StepBuilder(parameters, plan, self._group),
            self._instruments,
            self._outputs,
            self._problems,
            manual=not self._optimizers,
        )
        tensors = [named.tensor for named in parameters]
        self._steps: OptimizerSteps | ManualSteps
        if self._optimizers:
            self._steps = OptimizerSteps(model, tensors, self._optimizers, self._line)
        else:
            self._steps = ManualSteps(model, tensors, self._line)
        self._missing_steps = MissingSteps(tensors, self._optimizers, self._line, self._problems)
        self._ended_early = False
        self._shutdown = ShutdownHooks(_ProcessEnd(self))
        if self._opened.store is not None:
            first_step = self._opened.first_step
            write_run_config(self._opened.store, options, first_step, parameters, self._optimizers)
        # Hooks come last: whatever fails above leaves the model as it was.
        self._steps.start()
        if self._run_dir is not None:
            by_hand = not self._optimizers
            steps = WatchedSteps(self._opened.first_step, self._line.builder, by_hand)
            count_steps_of(self._run_dir, steps)
        self._missing_steps.start()
        if self._instruments.incidents is not None:
            self._instruments.incidents.start()
        if self._instruments.signals is not None:
            self._instruments.signals.start()

    def _make_instruments(
        self,
        model: nn.Module,
        parameters: Sequence[Named],
        options: WatchOptions,
        checks: Sequence[CheckSettings] | None,
    ) -> WatchedInstruments:
        health: Health | None = None
        signals: TrainingSignals | None = None
        incidents: FlightRecorder | None = None
        dumps: WatchedDumps | None = None
        if checks is not None:
            closer_looks = CloserLooks(self._opened.first_step)
            judged = HealthOptions(checks, closer_looks, early=_dumps_bad_steps(options.dump))
            health = Health(
                model, parameters, self._optimizers, judged, self._group, self._problems
            )
            inner = [innermost_optimizer(optimizer) for optimizer in self._optimizers]
            signals = TrainingSignals(model, inner)
        if options.recorder is not False:
            recorded = RecorderOptions(
                with_batch=options.recorder == "batch",
                seconds=options.diagnose_seconds,
                rules={} if health is None else health.incident_rules(),
                names=[named.name for named in parameters],
            )
            incidents = FlightRecorder(model, self._run_dir, recorded, self._problems)
        if options.dump is not None:
            dumps = WatchedDumps(options.dump, model, len(self._optimizers), self._problems)
            if health is None and options.dump.dump_on is not None:
                self._problems.report(
                    "dump-on", "dump_on dumps what is judged bad, but health=False judges nothing"
                )
        return WatchedInstruments(health, signals, incidents, dumps)

    # For the user.

    def step(self, step: int | None = None, **scalars: object) -> None:
        """The gradient is in place, not yet clipped: record it, go on to the next step.

        For loops without a watched optimizer.

        step: your own number for this step; steps only go forward.
        """
        if isinstance(self._steps, OptimizerSteps):
            self._problems.report(
                "step-by-hand",
                "Watch.step() does nothing beside a watched optimizer but log: its steps are "
                "counted already",
            )
            self.log(**scalars)
            return
        builder = self._line.builder
        if step is not None:
            step = whole_number(step, "step")
            if step < builder.step:
                raise UsageError(
                    f"steps only go forward: step {step} after step {builder.step - 1}. "
                    f"To record steps again, open the run with start_step={step}."
                )
            builder.jump_to(step)
        values = take_scalars(scalars)
        if self._is_over():
            return
        builder.log(values)
        self._steps.step()

    def ids(self, sample_ids: Sequence[int | str] | torch.Tensor) -> None:
        """Name the samples of the next call of the model, for a diagnosis to call them so."""
        if self._instruments.incidents is not None and not self._closed:
            self._instruments.incidents.calls.name_samples(sample_ids)

    def log(self, **scalars: object) -> None:
        """Add loss=, lr= or anything else to the current step.

        That is the one under way, or the one just made if none has begun.
        """
        values = take_scalars(scalars)
        if not values or self._is_over():
            return
        builder = self._line.builder
        if builder.begun:
            builder.log(values)
            return
        known = {name: arrived(value) for name, value in values.items()}
        for output in self._outputs:
            output.log(builder.step - 1, known)

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """One number of a step, as trackers take it: a watch is one too.

        step: the one under way, or the one just made. What is counted otherwise, such as epochs,
          is kept apart from the steps; it belongs into a MetricsTracker.
        """
        number = single_number(value, name)
        step = whole_number(step, "step")
        if self._is_over() or rank() != 0:
            return
        now = self._line.builder.step
        is_of_the_run = now - 1 <= step <= now
        if not is_of_the_run:
            self._problems.report(
                "other-steps",
                f"{name} was logged under step {step}, but the watch is at step {now}: it is kept "
                "apart from the steps, as a tracker's own (Scalar.source). Give the step of the "
                "watch; for epochs and other counts use gradsight.MetricsTracker",
            )
        for output in self._outputs:
            if is_of_the_run:
                output.log_scalar(step, name, number)
            else:
                output.log_tracked(step, name, number)

    def _is_over(self) -> bool:
        """Whether nothing is recorded any more; whoever goes on as if it were is told so, once."""
        if self._forked:
            self._problems.report("forked", _FORKED)
        elif self._closed:
            self._problems.report("closed", _CLOSED)
        return self._closed

    def report(self) -> HealthReport:
        """The Gradient Health Report of the run so far; under ranks, rank 0 has it."""
        if self._instruments.health is None:
            raise UsageError("this watch judges nothing: it was opened with health=False")
        if not self._closed:
            self._line.flush()
        report = self._instruments.health.report()
        findings: Sequence[Any] = report.findings
        if self._instruments.incidents is not None:
            findings = self._instruments.incidents.with_causes(findings)
        if self._run_dir is not None:
            findings = with_ranks(self._run_dir, findings)
        return replace(report, findings=tuple(findings))

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

    # For those who open watches of their own.

    def also_optimized_by(self, optimizer: object) -> None:
        """An optimizer that holds some of these parameters, but is watched elsewhere."""
        if self._instruments.health is not None:
            self._instruments.health.also_optimized_by(optimizer)

    # When the process ends.

    def _ended_by(self, error: BaseException) -> None:
        """An exception ends the run: the flight recorder writes down how things stood."""
        self._ended_early = True
        if self._instruments.incidents is not None and not self._closed:
            self._instruments.incidents.failed(self._line.builder.step, error)

    def _asked_to_end(self) -> None:
        """SIGTERM has come: the flight recorder writes down how things stood."""
        self._ended_early = True
        if self._instruments.incidents is not None and not self._closed:
            self._instruments.incidents.asked_to_end(self._line.builder.step)

    def _detach_in_child(self) -> None:
        """In a forked child: the record is the parent's.

        Whoever trains on here is told that nothing of it is recorded.
        """
        self._closed = True
        self._forked = True
        moments.renew_lock()
        self._stop_counting()
        self._steps.stop()
        self._missing_steps.stop()
        self._line.stop()
        for optimizer in self._optimizers:
            _say_at_next_step(optimizer, _FORKED)

    def _close(self, wait: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._stop_counting()
        self._steps.stop()
        self._missing_steps.stop()
        self._line.stop(_PATIENCE if wait else _SHORT_PATIENCE)
        # Whoever was interrupted before the first step knows why there is none.
        if not self._ended_early:
            self._missing_steps.report()
        self._shutdown.cancel()
        if self._instruments.dumps is not None:
            with self._survives("dumps"):
                self._instruments.dumps.close()
        with self._survives("closing"):
            if wait or not self._line.builder.is_merged:
                self._line.flush()
            # Without waiting the other ranks may be gone; the group closes when the process does.
            if wait and self._group is not None:
                self._group.close()
        with self._survives("judging"):
            self._line.finish_judging()
        if self._instruments.incidents is not None:
            with self._survives("recorder"):
                self._instruments.incidents.stop()
        if self._opened.sinks is not None:
            with self._survives("sinks"):
                self._opened.sinks.close()
        self._close_store()

    def _stop_counting(self) -> None:
        if self._run_dir is not None:
            stop_counting(self._run_dir)

    def _close_store(self) -> None:
        store = self._opened.store
        if store is None:
            return
        with self._survives("store"):
            store.recording = False
            store.close()

    @contextlib.contextmanager
    def _survives(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._problems.report(what, f"{what} failed: {type(error).__name__}: {error}")


class _ProcessEnd:
    """What the process's end means for a watch."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def close_at_exit(self) -> None:
        """Close without waiting: other ranks may be gone."""
        self._watch._close(wait=False)

    def detach_in_child(self) -> None:
        """This process was forked from the one that is being recorded."""
        self._watch._detach_in_child()

    def asked_to_end(self) -> None:
        """SIGTERM has come; `close_at_exit` follows."""
        self._watch._asked_to_end()

    def ended_by(self, error: BaseException) -> None:
        """An exception that nobody has caught ends the process."""
        self._watch._ended_by(error)


def _dumps_bad_steps(dumper: GradientDumper | None) -> bool:
    return dumper is not None and dumper.enabled and dumper.dump_on is not None


def _measuring_plan(
    options: WatchOptions, opened: OpenedRun, instruments: WatchedInstruments
) -> MeasuringPlan:
    health = instruments.health
    known_early = health is not None and health.early is not None
    return MeasuringPlan(
        first_step=opened.first_step,
        norms=options.stats,
        histograms=options.histograms,
        closer_looks=None if health is None else CloserLooks(opened.first_step),
        unit_rows=() if health is None else health.unit_rows,
        on_every_rank=instruments.incidents is not None or known_early,
        at_once=known_early,
    )


def _say_at_next_step(optimizer: Any, message: str) -> None:
    def stepped(*_: Any) -> None:
        handle.remove()
        say(message)

    handle = innermost_optimizer(optimizer).register_step_post_hook(stepped)
