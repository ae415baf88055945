"""gradsight.watch: opens a watch, or one that does nothing where Gradsight is switched off."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import nn

from gradsight.core.switch import is_switched_off
from gradsight.dump.dumper import GradientDumper
from gradsight.incidents.recorder import SECONDS
from gradsight.session.left_behind import close_left_behind, remember
from gradsight.session.options import WatchOptions
from gradsight.session.watch_session import Watch
from gradsight.values.findings import Finding
from gradsight.values.health_report import HealthReport, ParameterCounts, make_report
from gradsight.values.steps import Schedule


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
    on_finding: object = None,
    max_bytes: int | str | None = None,
    preflight: bool = True,
) -> Watch:
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
    on_finding: what to do about a finding: "stop" raises StopTraining out of `optimizer.step()`,
      "skip" leaves out steps whose gradient is not finite, "alert" tells W&B and Trackio, a
      callable gets the Finding; or a list of these, or such by code and severity:
      {"GS103": "skip", "critical": ["alert", "stop"]}.
    max_bytes: what the record may take, such as "2GB"; None has no limit. Old steps are then put
      together by their minimum and maximum, apart from those near findings.
    preflight: whether to check the first step for mistakes that no gradient norm shows: leaks,
      wrong targets or labels, wrong loss inputs, evaluation mode, lost gradients (GS601 to GS614).
      Some of these checks need extra passes on two rows, which take no longer than a step.

    With GRADSIGHT=0 in the environment nothing is watched and nothing is written.
    """
    options = WatchOptions(
        run_dir=run_dir,
        sinks=sinks,  # type: ignore[arg-type]  # it takes them as they are given
        stats=stats,
        histograms=histograms,
        health=health,
        dump=dump,
        recorder=recorder,
        start_step=start_step,
        sink_detail=sink_detail,
        diagnose_seconds=diagnose_seconds,
        quiet=quiet,
        on_finding=on_finding,
        preflight=preflight,
        max_bytes=max_bytes,  # type: ignore[arg-type]  # a text such as "2GB" becomes a number
    )
    return open_watch(model, optimizer, options)


def open_watch(model: nn.Module, optimizer: object, options: WatchOptions) -> Watch:
    """A watch with these options, or one that does nothing where Gradsight is switched off."""
    if is_switched_off():
        return SwitchedOff()
    close_left_behind(model, options.run_dir)
    watched = Watch(model, optimizer, options)
    remember(watched, model, options.run_dir)
    return watched


class SwitchedOff(Watch):
    """What `watch` gives where GRADSIGHT=0 is set: it takes everything and does nothing."""

    def __init__(self) -> None:
        """Nothing is opened."""

    def step(self, step: int | None = None, **scalars: object) -> None:
        """Nothing is recorded."""

    def ids(self, sample_ids: Sequence[int | str] | torch.Tensor) -> None:
        """Nobody asks for them."""

    def log(self, **scalars: object) -> None:
        """Nothing is recorded."""

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """Nothing is recorded."""

    def report(self) -> HealthReport:
        """The report of a run without a step."""
        return make_report(0, math.nan, ParameterCounts(0, 0, 0, 0), (), steps=0)

    def close(self) -> None:
        """Nothing is open."""

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def also_optimized_by(self, optimizer: object, is_wrapper: bool = False) -> None:
        """Nothing is judged."""

    @property
    def asked_to_stop(self) -> Finding | None:
        """Nothing is found."""
        return None
