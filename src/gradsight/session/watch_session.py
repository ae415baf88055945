"""A watched run: puts the parts of a session together, and takes them apart again."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from gradsight.core.group import LeavingProblems, ProcessGroup
from gradsight.core.guard import Guard
from gradsight.core.held_parts import parts_left_out
from gradsight.core.hooks import put_hook
from gradsight.core.open_watches import note_closed, note_open
from gradsight.core.optimizers import innermost_optimizer, parameters_of
from gradsight.core.parameters import Named
from gradsight.core.problems import Problems, say
from gradsight.core.shards import are_spread
from gradsight.core.sharing import Reduction
from gradsight.core.torch_names import refuse_unknown_torch
from gradsight.core.watched_steps import WatchedSteps, count_steps_of, stop_counting
from gradsight.errors import UsageError
from gradsight.health.judge import checks_at_work
from gradsight.health.registry import CheckSettings
from gradsight.session.assembly import (
    Workplace,
    make_brake,
    make_instruments,
    make_skipper,
    measuring_plan,
)
from gradsight.session.captures import Captures
from gradsight.session.cost import CostOutput
from gradsight.session.first_critical import FirstCritical
from gradsight.session.line import Output, StepLine
from gradsight.session.manual_steps import ManualSteps
from gradsight.session.missing_steps import MissingSteps
from gradsight.session.opening import (
    open_run_outputs,
    ranks_missing,
    write_run_config,
)
from gradsight.session.optimizer_steps import OptimizerSteps
from gradsight.session.options import WatchOptions
from gradsight.session.parameter_changes import ParameterChanges
from gradsight.session.readings import take_scalars
from gradsight.session.shutdown import ShutdownHooks
from gradsight.session.step_builder import StepBuilder
from gradsight.session.subjects import watched_optimizers, watched_parameters
from gradsight.session.unseeable import refuse_unseeable
from gradsight.store.incidents import with_ranks
from gradsight.values.findings import Finding, StopTraining
from gradsight.values.health_report import HealthReport
from gradsight.values.networks import UnmovedNetwork
from gradsight.values.whole_numbers import single_number, whole_number

_PATIENCE = 5.0
"""Seconds to wait at the end for what other ranks are still sending, where all end together."""
_SHORT_PATIENCE = 0.2
_FORKED = "this process was forked from one that is being recorded; what it trains is not recorded"
_RECORD_IT_TOO = ". To record it too, call gradsight.watch in it, with a run_dir of its own."

_NEW_ON_RANKS = (
    "the model has got new parameters in the middle of a run on several ranks: they are not "
    "recorded, and the record says so at every step"
)
_OPEN_ANOTHER = (
    ". Close the watch and open another one on every rank after the parameters have changed."
)
_CLOSED = "this watch is closed: what it is told from now on is not recorded"


class Watch:
    """A run being recorded.

    Use `watch(...)`; a context manager, closed at the latest when the process ends.
    """

    def __init__(self, model: nn.Module, optimizer: object, options: WatchOptions) -> None:
        refuse_unknown_torch("watch")
        refuse_unseeable(model, optimizer)
        parameters = watched_parameters(model)
        self._optimizers = watched_optimizers(optimizer, model, parameters)
        # Wrong settings are an error before anything is opened.
        checks = None if options.health is False else checks_at_work(options.health)
        self._closed = False
        self._forked = False
        self._ended_early = False
        self._record_is_closed = False
        self._waits = True
        self._run_dir = None if options.run_dir is None else Path(options.run_dir).resolve()
        self._group = ProcessGroup.or_alone("watch")
        left_out = self._parts_left_out(parameters)
        self._opened = open_run_outputs(options, parameters, self._group)
        self._problems = self._opened.problems
        if self._group.incomplete is not None:
            self._problems.report("ranks", ranks_missing(self._group, options.attached))
        looking = "Gradsight stopped looking at gradients"
        self._guard = Guard(LeavingProblems(self._problems), "capture", looking)
        self._calls = Guard(self._problems, "call", "a call of the watch failed", UsageError)
        self._closing = Guard(self._problems, "closing", "closing the watch failed")
        noticing = "Gradsight no longer sees new parameters"
        self._noticing = Guard(self._problems, "new-parameters", noticing)
        self._outputs: list[Output] = []
        """Where finished steps go, beside the record and the sinks."""
        self._earlier_findings: list[Finding] = []
        """Of the time before the model's parameters changed."""
        try:
            self._start(model, parameters, options, checks, left_out)
        except BaseException:
            self._closed = True
            self._ended_early = True
            self._closing.close()
            raise

    def _start(
        self,
        model: nn.Module,
        parameters: Sequence[Named],
        options: WatchOptions,
        checks: Sequence[CheckSettings] | None,
        left_out: Sequence[bool],
    ) -> None:
        if self._opened.sinks is not None:
            # Last of all: an interrupt may have come when the sinks were about to be closed.
            self._closing.at_end(self._opened.sinks.worker.end.set)
        # Twice: an interrupt may have come when the first was about to begin.
        self._closing.at_end(self._close_record)
        self._closing.at_end(self._close_record)
        self._model = model
        self._options = options
        self._checks = checks
        self._first_step = self._opened.first_step
        tensors = [named.tensor for named in parameters]
        if self._group.is_first and not options.quiet:
            self._outputs.append(FirstCritical(options.run_dir))
        if self._opened.store is not None:
            self._outputs.append(CostOutput(self._opened.store))
        place = self._workplace(parameters)
        self._brake = make_brake(place, options)
        if self._brake is not None:
            self._outputs.append(self._brake)
        self._assemble(place, left_out)
        self._leave_for_the_end()
        ShutdownHooks(_Process(self), self._closing)
        self._write_config(parameters)
        # Hooks come last: whatever fails above leaves the model as it was.
        self._changes = ParameterChanges(model, tensors, self._noticing, self._parameters_changed)
        # Sharded parameters are other tensors while they are gathered.
        if not are_spread(tensors):
            self._changes.start()
        self._start_parts(tensors)
        self._closing.at_end(note_closed, self)
        if self._run_dir is not None:
            self._closing.at_end(stop_counting, self._run_dir)
        _open.append(self)
        self._closing.at_end(_open.remove, self)

    def _workplace(self, parameters: Sequence[Named], has_begun: bool = False) -> Workplace:
        return Workplace(
            self._model,
            parameters,
            self._optimizers,
            self._run_dir,
            self._opened,
            self._group,
            has_begun,
        )

    def _assemble(self, place: Workplace, left_out: Sequence[bool]) -> None:
        """Make everything that depends on which parameters there are."""
        self._instruments = make_instruments(place, self._options, self._checks)
        plan = measuring_plan(place, self._options, self._instruments)
        outputs = self._opened.outputs(place.parameters, self._options.sink_detail)
        self._line = StepLine(
            StepBuilder(place.parameters, plan, self._group, left_out),
            self._instruments,
            [*outputs, *self._outputs],
            self._problems,
            self._brake,
            Reduction(self._model, place.tensors),
            manual=not self._optimizers,
        )
        self._steps: OptimizerSteps | ManualSteps
        tensors = place.tensors
        if self._optimizers:
            skipper = make_skipper(place, self._options)
            self._steps = OptimizerSteps(
                tensors, self._optimizers, self._line, self._guard, skipper
            )
        else:
            self._steps = ManualSteps(tensors, self._line, self._guard)
        self._missing_steps = MissingSteps(
            tensors,
            self._optimizers,
            self._line,
            self._problems,
            self._guard,
            self._is_watched_elsewhere,
            self._options.attached,
        )
        self._captures = Captures(tensors, place.inner_optimizers, self._problems)

    def _start_parts(self, tensors: Sequence[torch.Tensor]) -> None:
        self._steps.start()
        if self._run_dir is not None:
            by_hand = not self._optimizers
            steps = WatchedSteps(self._first_step, self._line.builder, by_hand)
            count_steps_of(self._run_dir, steps)
        note_open(self, self._run_dir, tensors)
        self._missing_steps.start()
        if self._instruments.incidents is not None:
            self._instruments.incidents.start()
        if self._instruments.losses is not None:
            self._instruments.losses.start()
        self._captures.start()
        if self._instruments.signals is not None:
            self._instruments.signals.start()

    def _is_watched_elsewhere(self, optimizer: Any) -> bool:
        others = (watch for watch in open_watches() if watch is not self)
        return any(
            optimizer is innermost_optimizer(each) for watch in others for each in watch._optimizers
        )

    def _write_config(self, parameters: Sequence[Named]) -> None:
        if self._opened.store is not None:
            write_run_config(
                self._opened.store,
                self._options,
                self._first_step,
                parameters,
                self._optimizers,
            )

    def _parameters_changed(self, parameters: list[Named]) -> None:
        """The model has other parameters than before: record these from the next step on."""
        if self._group.size > 1:
            # The other ranks may not have come here: nothing is opened again without them.
            text = self._with_advice(_NEW_ON_RANKS, _OPEN_ANOTHER)
            self._problems.report("new-parameters", text, step=self._line.builder.step)
            if isinstance(self._steps, OptimizerSteps):
                self._steps.lacks_parameters = True
            return
        before = self._line
        self._finish_round()
        before.flush()
        if self._instruments.health is not None:
            self._earlier_findings += self._instruments.health.report().findings
        for guard in self._guards():
            guard.close()
        self._stop_comparing()
        before.finish_judging()
        self._stop_incidents()
        self._wait_for_dumps()
        self._opened = replace(self._opened, first_step=before.builder.step)
        tensors = [named.tensor for named in parameters]
        place = self._workplace(parameters, has_begun=True)
        self._assemble(place, self._parts_left_out(parameters))
        self._line.continue_from(before)
        for guard in self._guards():
            self._closing.at_end(guard.close)
        self._write_config(parameters)
        self._changes.watch_instead(tensors)
        self._start_parts(tensors)

    def _with_advice(self, text: str, advice: str) -> str:
        """Return a sentence, with advice for those who have opened the watch themselves."""
        return text if self._options.attached else text + advice

    def _parts_left_out(self, parameters: Sequence[Named]) -> list[bool]:
        """Of which parameters another rank's part is counted; refused alike on all ranks."""
        tensors = [named.tensor for named in parameters]
        try:
            return parts_left_out(self._group, tensors, [named.name for named in parameters])
        except BaseException:
            self._group.close()
            raise

    def _leave_for_the_end(self) -> None:
        """What `close` does, the last first; each under the guard by itself."""
        end = self._closing.at_end
        dumps = self._instruments.dumps
        if self._brake is not None:
            end(self._brake.close)
        end(self._stop_incidents)
        end(self._finish_judging)
        end(self._finish_steps)
        end(self._wait_for_dumps)
        if dumps is not None and dumps.keeps_gradients:
            # Before: what is judged only now may be dumped.
            end(self._flush)
        # Whoever was interrupted before the first step knows why there is none.
        end(self._say_what_is_missing)
        end(self._stop_comparing)
        end(self._finish_round)
        end(self._noticing.close)
        for guard in self._guards():
            end(guard.close)

    # Parts of closing, each of the parts that are at work by then.

    def _stop_incidents(self) -> None:
        if self._instruments.incidents is not None:
            self._instruments.incidents.stop()

    def _finish_judging(self) -> None:
        self._line.finish_judging()

    def _wait_for_dumps(self) -> None:
        if self._instruments.dumps is not None:
            self._instruments.dumps.close()

    def _flush(self) -> None:
        self._line.flush()

    def _finish_round(self) -> None:
        """Optimizers that never step leave the last step open."""
        if not isinstance(self._steps, OptimizerSteps):
            return
        if self._waits or not self._line.builder.is_merged:
            with contextlib.suppress(StopTraining):
                self._steps.finish()

    def _guards(self) -> list[Guard]:
        """Those of hooks, which they take away."""
        guards = [self._guard, self._captures.guard]
        if self._instruments.signals is not None:
            guards.append(self._instruments.signals.guard)
            if self._instruments.signals.first_look is not None:
                guards.append(self._instruments.signals.first_look.guard)
        if self._instruments.incidents is not None:
            guards.append(self._instruments.incidents.guard)
        return guards

    # For the user.

    def step(self, step: int | None = None, **scalars: object) -> None:
        """The gradient is in place, not yet clipped: record it, go on to the next step.

        For loops without a watched optimizer.

        step: your own number for this step; steps only go forward.
        """
        self._calls.run(self._step, step, scalars)

    def _step(self, step: int | None, scalars: Mapping[str, object]) -> None:
        if isinstance(self._steps, OptimizerSteps):
            self._problems.report(
                "step-by-hand",
                "Watch.step() does nothing beside a watched optimizer but log: its steps are "
                "counted already",
            )
            self._log(scalars)
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
        with self._line.lock:
            builder.log(values)
            self._steps.step()

    def ids(self, sample_ids: Sequence[int | str] | torch.Tensor) -> None:
        """Name the samples of the next call of the model, for a diagnosis to call them so."""
        if self._instruments.incidents is not None and not self._closed:
            self._calls.run(self._instruments.incidents.calls.name_samples, sample_ids)

    def log(self, **scalars: object) -> None:
        """Add loss=, lr= or anything else to the current step.

        That is the one under way, or the one just made if none has begun.
        """
        self._calls.run(self._log, scalars)

    def _log(self, scalars: Mapping[str, object]) -> None:
        values = take_scalars(scalars)
        if values and not self._is_over():
            self._line.log(values)

    def log_under_way(self, **scalars: object) -> None:
        """As `log`, for whoever knows that the step under way has begun; for trainers' doors."""
        self._calls.run(self._log_under_way, scalars)

    def _log_under_way(self, scalars: Mapping[str, object]) -> None:
        values = take_scalars(scalars)
        if not self._is_over():
            self._line.log_under_way(values)

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """One number of a step, as trackers take it: a watch is one too.

        step: the one under way, or the one just made. What is counted otherwise, such as epochs,
          is kept apart from the steps; it belongs into a MetricsTracker.
        """
        self._calls.run(self._log_scalar, name, value, step)

    def _log_scalar(self, name: str, value: float, step: int) -> None:
        number = single_number(value, name)
        step = whole_number(step, "step")
        if self._is_over() or not self._group.is_first:
            return
        now = self._line.builder.step
        if not self._line.log_scalar(name, number, step):
            self._problems.report(
                "other-steps",
                f"{name} was logged under step {step}, but the watch is at step {now}: it is kept "
                "apart from the steps, as a tracker's own (Scalar.source). Give the step of the "
                "watch; for epochs and other counts use gradsight.MetricsTracker",
            )

    def _is_over(self) -> bool:
        """Whether nothing is recorded any more; whoever goes on as if it were is told so, once."""
        if self._forked:
            self._problems.report("forked", self._with_advice(_FORKED, _RECORD_IT_TOO))
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
        findings: Sequence[Any] = [*self._earlier_findings, *report.findings]
        if self._instruments.incidents is not None:
            findings = self._instruments.incidents.with_causes(findings)
            findings = self._instruments.health.advised(findings)
        if self._run_dir is not None:
            findings = with_ranks(self._run_dir, findings)
        return replace(report, findings=tuple(findings))

    # Called by the user: nothing of ours is called from these but guards.

    def close(self) -> None:
        """Write what is left, take every hook away. Closing again does nothing; nothing raises."""
        self._closed = True
        self._closing.close()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if error is not None:
            self._closing.attempt(self._ended_by, error)
            # Other ranks may be gone.
            self._waits = False
        self._closed = True
        self._closing.close()

    # For those who open watches of their own.

    def give_way(self) -> None:
        """Close for a watch that takes its place: it may well not have seen a single step."""
        self._ended_early = True
        self.close()

    @property
    def step_under_way(self) -> int:
        """The number of the step that is being made, or comes next."""
        return self._line.builder.step

    def go_to(self, step: int) -> None:
        """Give the next step this number; for trainers that leave some out. Never back."""
        if step > self.step_under_way:
            self._line.builder.jump_to(step)

    @property
    def step_to_log(self) -> int:
        """The number of the step that `log` adds to: under way, or just made if none has begun."""
        builder = self._line.builder
        return builder.step if builder.begun else builder.step - 1

    @property
    def is_incomplete(self) -> bool:
        """Whether ranks are missing that train too: what is asked of all of them would wait."""
        return self._group.incomplete is not None

    @property
    def problems(self) -> Problems:
        """The faults of the run, for whoever adds to it."""
        return self._problems

    def also_writes_to(self, output: Output) -> None:
        """Hand finished steps and their findings to this one too."""
        self._outputs.append(output)
        self._line.also_write_to(output)

    def finish_steps(self, on_disk: bool = False) -> None:
        """Finish all steps that were made, though that waits for the device; on all ranks alike.

        on_disk: whether readers are to find them at once, and not a moment later.
        """
        if self._closed:
            return
        self._line.flush()
        if on_disk and self._opened.store is not None:
            self._opened.store.flush()

    @property
    def is_open(self) -> bool:
        """Whether steps are recorded."""
        return not self._closed

    @property
    def run_dir(self) -> Path | None:
        """Where the record is."""
        return self._run_dir

    def add_optimizer(self, optimizer: Any) -> None:
        """An optimizer made later that trains the same parameters, maybe in place of another."""
        inner = innermost_optimizer(optimizer)
        given = parameters_of(inner)
        stay = [
            each for each in self._optimizers if parameters_of(innermost_optimizer(each)) - given
        ]
        self._optimizers[:] = [*stay, optimizer]
        if isinstance(self._steps, OptimizerSteps):
            self._steps.add_optimizer(optimizer)
        self._missing_steps.also_watched(inner)
        if self._instruments.signals is not None:
            self._instruments.signals.add_optimizer(inner)
        if self._instruments.health is not None:
            self._instruments.health.add_optimizer(inner, self.step_under_way)

    @property
    def asked_to_stop(self) -> Finding | None:
        """The finding that training is to stop for: on_finding="stop" has asked for it."""
        return None if self._brake is None else self._brake.asked_to_stop

    def also_optimized_by(self, optimizer: object, is_wrapper: bool = False) -> None:
        """Note an optimizer that holds some of these parameters, but that this watch does not own.

        is_wrapper: an inner optimizer, which is watched, makes the update.
        """
        if self._instruments.health is not None:
            self._instruments.health.also_optimized_by(optimizer)
        if self._instruments.signals is not None and not is_wrapper:
            self._instruments.signals.compare_optimizers()

    def compare_networks(self, unmoved: Sequence[UnmovedNetwork]) -> None:
        """All networks of the script were compared with its optimizers; these are unmoved."""
        if self._instruments.health is not None:
            self._instruments.health.unmoved = unmoved

    # When the run ends.

    def _ended_by(self, error: BaseException) -> None:
        """An exception ends the run: the flight recorder writes down how things stood."""
        if self._instruments.incidents is not None and not (self._closed or self._ended_early):
            self.script_failed(error)
            self._instruments.incidents.failed(self._line.builder.step, error)
        self._ended_early = True

    def script_failed(self, where: BaseException | FrameType) -> None:
        """Find out whether the script failed because of its loss."""
        incidents, health = self._instruments.incidents, self._instruments.health
        if incidents is None or health is None or not self._group.is_first or self._closed:
            return
        health.at_end = incidents.guard.run(incidents.loss_at_end, self._line.builder.step, where)

    def _say_what_is_missing(self) -> None:
        # Of steps that a graph hides it was said already.
        if not (self._ended_early or self._captures.hides_steps):
            self._missing_steps.report()

    def _stop_comparing(self) -> None:
        if self._instruments.health is not None:
            self._instruments.health.stop(_PATIENCE if self._waits else _SHORT_PATIENCE)

    def _finish_steps(self) -> None:
        patience = None
        if self._line.builder.is_merged and not self._waits:
            # At the end of a script all ranks come here, but not after an error in one of them.
            patience = _SHORT_PATIENCE if self._ended_early else _PATIENCE
        self._line.flush(patience)
        # Without waiting the other ranks may be gone; the group closes when the process does.
        if self._waits:
            self._group.close()

    def _close_record(self) -> None:
        if self._record_is_closed:
            return
        try:
            if self._opened.sinks is not None:
                self._opened.sinks.close()
        finally:
            if self._opened.store is not None:
                self._opened.store.recording = False
                self._opened.store.close()
            self._record_is_closed = True


_open: list[Watch] = []


def open_watches() -> list[Watch]:
    """The watches of this process that are open, the oldest first."""
    return [watch for watch in _open if not watch._closed]


class _Process:
    """What becomes of the process, as a watch is told of it."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def close_at_exit(self) -> None:
        """Close without waiting: other ranks may be gone."""
        self._watch._waits = False
        self._watch.close()

    def detach_in_child(self) -> None:
        """This process was forked: the record is its parent's.

        Whoever trains on here is told that nothing of it is recorded.
        """
        watch = self._watch
        watch._closed = True
        watch._forked = True
        for guard in watch._guards():
            guard.close()
        # What else there is to close is the parent's.
        watch._closing = Guard(watch._problems, "closing", "closing the watch failed")
        if watch._run_dir is not None:
            stop_counting(watch._run_dir)
        for optimizer in watch._optimizers:
            _say_at_next_step(optimizer, watch._with_advice(_FORKED, _RECORD_IT_TOO))

    def ended_by(self, error: BaseException) -> None:
        """An exception that nobody has caught ends the process."""
        self._watch._ended_by(error)

    def given_up(self, frame: FrameType) -> None:
        """Handle an exit of the script with an error status."""
        self._watch.script_failed(frame)


def _say_at_next_step(optimizer: Any, message: str) -> None:
    said = False

    def stepped(*_: Any) -> None:
        nonlocal said
        if not said:
            said = True
            say(message)

    guard = Guard(None, "forked", message)
    put_hook(guard, innermost_optimizer(optimizer).register_step_post_hook, stepped)
