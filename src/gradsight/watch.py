"""The composer: introduces capture, measure, record and show to each other, and cleans up after them."""

import atexit
import contextlib
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from gradsight import dist
from gradsight.assemble import Assembler, Measured, take_scalars
from gradsight.capture.manual import ManualCapture
from gradsight.capture.names import named_parameters
from gradsight.capture.steps import NONE, OptimizerCapture, check_optimizers
from gradsight.errors import RunError, UsageError
from gradsight.measure.arrival import Arrival
from gradsight.measure.histogram import histograms, share_within_a_tenth
from gradsight.measure.norms import combine
from gradsight.measure.update import update_ratios
from gradsight.record.feed import Feed
from gradsight.record.frames import pack_statistics
from gradsight.record.problems import Problems
from gradsight.record.sinks import open_sinks
from gradsight.record.store import Store, open_store, write_config
from gradsight.records import Schedule, block_of

GRADIENT = "accumulated over micro-batches, reduced over ranks, unscaled, before clipping"
_MANY_PARAMETERS = 500
_FAILED = -1


def watch(
    model: nn.Module,
    optimizer: Any = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    sinks: Iterable[Any] = (),
    stats: Schedule = Schedule(),
    histograms: Schedule = Schedule(step_interval=50),
    start_step: int | None = None,
    sink_detail: Literal["parameters", "blocks"] | None = None,
) -> "Watch":
    """Record what the gradients of a model do while it trains, at next to no cost.

    optimizer: one or several. Each of their steps is then observed by itself, before clipping; several that step in turn make
      one step together. Without one, call `Watch.step()` after backward and before clipping.
    run_dir: where the record goes; None writes nothing to disk. A directory that holds a run is continued.
    sinks: "console", "wandb", "tensorboard", "trackio", or objects with a method log_scalar(name, value, step).
    stats: when norms are recorded. histograms: when histograms and update-to-weight ratios are.
    start_step: the number of the first step. Recorded steps from there on are replaced. None: after the last recorded one.
    sink_detail: whether sinks get every parameter or blocks of them; None decides by the number of parameters (500).
    """
    return Watch(model, optimizer, run_dir, sinks, stats, histograms, start_step, sink_detail)


class Watch:
    """A run being recorded. Use `watch(...)`; a context manager, closed at the latest when the process ends."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        run_dir: str | os.PathLike[str] | None,
        sinks: Iterable[Any],
        stats: Schedule,
        histogram_schedule: Schedule,
        start_step: int | None,
        sink_detail: str | None,
    ) -> None:
        optimizers = check_optimizers(optimizer)
        self._parameters = _check_model(model)
        self._names = [parameter.name for parameter in self._parameters]
        self._blocks = _blocks(self._names, sink_detail)
        self._problems = Problems()
        self._store: Store | None = None
        self._feed: Feed | None = None
        self._closed = False
        self._group = dist.own_group()
        first_step = self._open_record(run_dir, sinks, start_step)
        tensors = [parameter.tensor for parameter in self._parameters]
        self._assembler = Assembler(tensors, stats, histogram_schedule, first_step, self._group, self._deliver, self._failed)
        self._capture: OptimizerCapture | ManualCapture
        if optimizers:
            self._capture = OptimizerCapture(model, tensors, optimizers, self._assembler)
        else:
            self._capture = ManualCapture(model, tensors, self._assembler)
        self._ending = _Ending(self)
        if self._store is not None:
            settings = {"stats": stats, "histograms": histogram_schedule, "start_step": first_step, "sink_detail": sink_detail}
            write_config(self._store.path, _config(settings, self._parameters, optimizers))
        self._capture.start()

    def step(self, step: int | None = None, **scalars: Any) -> None:
        """The gradient is in place, not yet clipped: record it, go on to the next step. For loops without a watched optimizer.

        step: your own number for this step; steps only go forward.
        """
        if isinstance(self._capture, OptimizerCapture):
            self._problems.report(
                "step-by-hand", "Watch.step() does nothing beside a watched optimizer but log: its steps are counted already"
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
        if not self._closed:
            self._assembler.log(take_scalars(scalars))
            self._capture.step()

    def log(self, **scalars: Any) -> None:
        """Add loss=, lr= or anything else to the current step: the one under way, or the one just made if none has begun."""
        values = take_scalars(scalars)
        if self._closed or not values:
            return
        if self._assembler.begun:
            self._assembler.log(values)
        else:
            self._log_afterwards({name: _value(value) for name, value in values.items()})

    @property
    def current_step(self) -> int:
        """The number of the step under way."""
        return self._assembler.step

    def close(self) -> None:
        """Write what is left, take every hook away. Closing again does nothing."""
        self._close(wait=True)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(wait=kind is None)

    def _close(self, wait: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._capture.stop()
        self._ending.cancel()
        with self._survives("closing"):
            self._assembler.close(wait)
            if wait and self._group is not None:
                self._group.close()
        if self._feed is not None:
            with self._survives("sinks"):
                self._feed.close()
        if self._store is not None:
            with self._survives("store"):
                for problem in self._problems.all():
                    self._store.add_problem(problem)
                self._store.recording = False
                self._store.close()

    # Opening.

    def _open_record(self, run_dir: str | os.PathLike[str] | None, sinks: Iterable[Any], start_step: int | None) -> int:
        """Open store and sinks, on rank 0; tell the first step, on all ranks."""
        if start_step is not None and start_step < 0:
            raise UsageError(f"start_step must be 0 or more, got {start_step}")
        if self._group is None:
            return self._open_on_first_rank(run_dir, sinks, start_step)
        first = _FAILED
        try:
            if dist.rank() == 0:
                first = self._open_on_first_rank(run_dir, sinks, start_step)
        finally:
            first = self._group.from_first_rank(first)
        if first == _FAILED:
            raise RunError("rank 0 could not open the run; its own error says why")
        return first

    def _open_on_first_rank(self, run_dir: str | os.PathLike[str] | None, sinks: Iterable[Any], start_step: int | None) -> int:
        first = start_step or 0
        try:
            if run_dir is not None:
                self._store = open_store(run_dir, self._problems)
                if self._store.recording:
                    raise UsageError(f"this process is already recording steps into {run_dir}; give each watch its own run_dir")
                if start_step is None:
                    last = self._store.last_step()
                    first = 0 if last is None else last + 1
                else:
                    self._store.forget_from(first)
                self._store.recording = True
                self._problems.on_new = self._store.add_problem
            opened = open_sinks(sinks, self._store.path if self._store else None)
            if opened:
                self._feed = Feed(opened, self._problems)
        except BaseException:
            if self._store is not None:
                self._store.close()
            raise
        return first

    # What the assembler delivers.

    def _deliver(self, measured: Measured) -> None:
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
            packed = pack_statistics(None if everything else measured.rows, columns) if columns else b""
            self._store.add_step(step, self._names, packed)
        if measured.histogram_counters is not None:
            self._deliver_histograms(measured, names)
        if self._feed is not None:
            self._feed.scalars(_shown(measured, names, columns, self._blocks), step.step)

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
                    self._feed.histogram(f"gradients/{histogram.parameter}/histogram", histogram, number)

    def _log_afterwards(self, values: dict[str, float]) -> None:
        step = self._assembler.step - 1
        if self._store is not None:
            self._store.add_step_scalars(step, values)
        if self._feed is not None:
            self._feed.scalars(values, step)

    def _failed(self, error: Exception) -> None:
        """A fault of ours: training goes on without us."""
        self._capture.stop()
        where = _place(error)
        self._problems.report("capture", f"Gradsight stopped looking at gradients: {type(error).__name__}: {error} ({where})")

    @contextlib.contextmanager
    def _survives(self, what: str) -> Any:
        try:
            yield
        except Exception as error:
            self._problems.report(what, f"{what} failed: {type(error).__name__}: {error}")


class _Ending:
    """Closes a watch when the process exits or is asked to (SIGTERM), and leaves both as they were."""

    def __init__(self, watched: Watch) -> None:
        self._watch = watched
        self._process = os.getpid()
        self._previous: Any = None
        self._installed = False
        atexit.register(self._at_exit)
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True

    def cancel(self) -> None:
        """Put everything back; where somebody has set a handler since, theirs stays."""
        atexit.unregister(self._at_exit)
        in_main = threading.current_thread() is threading.main_thread()
        if self._installed and in_main and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
            self._installed = False

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self._watch._close(wait=False)

    def _on_signal(self, number: int, frame: Any) -> None:
        """Close, then do what would have been done without us. A forked child (a data loader's worker) only does the latter."""
        previous: Callable[..., Any] | int | None = self._previous
        if os.getpid() == self._process:
            self._watch._close(wait=False)
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _check_model(model: nn.Module) -> list[Any]:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    parameters = named_parameters(model)
    if not any(parameter.tensor.requires_grad for parameter in parameters):
        what = "no parameters" if not parameters else f"{len(parameters)} parameters, all of them frozen"
        raise UsageError(f"{type(model).__name__} has nothing to watch: {what}. Set requires_grad on what is to be trained.")
    return parameters


def _blocks(names: list[str], detail: str | None) -> list[str]:
    """The block of every parameter where sinks are to get blocks, else nothing."""
    if detail not in (None, "parameters", "blocks"):
        raise UsageError(f"sink_detail must be 'parameters' or 'blocks', got {detail!r}")
    wanted = detail == "blocks" or (detail is None and len(names) > _MANY_PARAMETERS)
    return [block_of(name) for name in names] if wanted else []


def _config(settings: dict[str, Any], parameters: list[Any], optimizers: list[Any]) -> dict[str, Any]:
    plain = {name: _fields(value) if isinstance(value, Schedule) else value for name, value in settings.items()}
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
        "world_size": dist.world_size(),
        "gradient": GRADIENT,
        "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
        "parameters": [_fields(parameter) for parameter in described],
    }


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def _columns(measured: Measured) -> dict[str, Any]:
    """What is stored per parameter: counts only where there is something to count, ratios only where they were measured."""
    columns: dict[str, Any] = {}
    if measured.norms is not None:
        columns = {"l2": measured.norms.l2, "max_abs": measured.norms.max_abs}
        if not measured.norms.finite:
            columns |= {"nan": measured.norms.nan, "inf": measured.norms.inf}
        if measured.update_sums is not None and measured.update_sums.any():
            columns["update_ratio"], columns["update_ratio_error"] = update_ratios(measured.update_sums)
    return columns


def _shown(measured: Measured, names: list[str], columns: dict[str, Any], blocks: list[str]) -> dict[str, float]:
    """What sinks get of a step."""
    step = measured.step
    known = {"loss": step.loss, "lr": step.lr, "gradients/total_norm": step.total_norm, "gradients/clip_coef": step.clip_coef}
    shown = {name: value for name, value in known.items() if value is not None} | dict(step.scalars)
    if not columns:
        return shown
    if blocks:
        return shown | _block_norms(columns["l2"], [blocks[row] for row in measured.rows])
    shown |= {f"gradients/{name}/norm": value for name, value in zip(names, columns["l2"].tolist(), strict=True)}
    for column, suffix in (("nan", "nan"), ("inf", "inf"), ("update_ratio", "update_ratio")):
        values = columns[column].tolist() if column in columns else ()
        shown |= {
            f"gradients/{name}/{suffix}": value for name, value in zip(names, values, strict=False) if value and value == value
        }
    return shown


def _block_norms(l2: Any, blocks: list[str]) -> dict[str, float]:
    members: dict[str, list[int]] = {}
    for position, block in enumerate(blocks):
        members.setdefault(block, []).append(position)
    return {f"gradients/{block}/norm": float(combine(l2[positions])) for block, positions in members.items()}


def _value(value: float | Arrival) -> float:
    return float(value.read()[0]) if isinstance(value, Arrival) else value


def _place(error: Exception) -> str:
    """Where an error of ours came from, for the message."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else "unknown place"
