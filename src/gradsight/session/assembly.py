"""Makes the parts of a watch from its options: what acts, judges, records and dumps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gradsight.core.devices import accelerators
from gradsight.core.experts import expert_groups
from gradsight.core.group import ProcessGroup, world_size
from gradsight.core.guard import Guard
from gradsight.core.optimizers import innermost_optimizer
from gradsight.core.parameters import Named
from gradsight.core.problems import Problems
from gradsight.core.shards import are_spread
from gradsight.dump.dumper import GradientDumper
from gradsight.dump.under_watch import WatchedDumps
from gradsight.health.health import Health, HealthOptions
from gradsight.health.registry import CheckSettings
from gradsight.incidents.recorder import FlightRecorder, RecorderOptions
from gradsight.session.brake import Brake
from gradsight.session.first_look import FIRST_SIGNALS, FirstLook, PreflightOptions
from gradsight.session.line import WatchedInstruments
from gradsight.session.loss_flags import LossFlags
from gradsight.session.on_finding import SKIP
from gradsight.session.opening import OpenedRun
from gradsight.session.options import WatchOptions
from gradsight.session.signals import TrainingSignals
from gradsight.session.skipping import UpdateSkipper
from gradsight.session.step_builder import MeasuringPlan
from gradsight.values.steps import CloserLooks


@dataclass(frozen=True)
class Workplace:
    """What is watched, and what is open for it."""

    model: nn.Module
    parameters: Sequence[Named]
    optimizers: Sequence[Any]
    run_dir: Path | None
    opened: OpenedRun
    group: ProcessGroup
    has_begun: bool = False
    """Whether steps were made already, with other parameters."""

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters themselves."""
        return [named.tensor for named in self.parameters]

    @property
    def inner_optimizers(self) -> list[Any]:
        """The optimizers that step, inside of whatever is around them."""
        return [innermost_optimizer(optimizer) for optimizer in self.optimizers]

    @property
    def problems(self) -> Problems:
        """The faults of the run."""
        return self.opened.problems

    @property
    def is_judged_late(self) -> bool:
        """Whether a step is judged when its gradient is gone: several ranks wait for it instead."""
        return world_size() == 1 and bool(accelerators(self.tensors))


def make_brake(place: Workplace, options: WatchOptions) -> Brake | None:
    """What acts on findings; None where nobody asked for that."""
    actions = options.actions()
    if actions is None:
        return None
    return Brake(
        actions,
        place.opened.sinks,
        place.group,
        place.problems,
        options.stop_raises,
    )


def make_skipper(place: Workplace, options: WatchOptions) -> UpdateSkipper | None:
    """What leaves out updates by gradients that are not finite; None where nobody asked for it."""
    actions = options.actions()
    if actions is None or not actions.includes(SKIP):
        return None
    # Where nothing is sharded all ranks hold the same gradients, and so decide alike.
    together = place.group if are_spread(place.tensors) else None
    return UpdateSkipper(together, place.problems)


def make_instruments(
    place: Workplace, options: WatchOptions, checks: Sequence[CheckSettings] | None
) -> WatchedInstruments:
    """Those that the options ask for; without checks nothing is judged."""
    health: Health | None = None
    signals: TrainingSignals | None = None
    incidents: FlightRecorder | None = None
    losses: LossFlags | None = None
    dumps: WatchedDumps | None = None
    if checks is not None:
        judged = _health_options(place, options, checks)
        health = Health(
            place.model, place.parameters, place.optimizers, judged, place.group, place.problems
        )
        signals = _make_signals(place, options)
    if options.recorder is not False:
        rules = {} if health is None else health.incident_rules()
        recorded = _recorder_options(place, options, rules)
        incidents = FlightRecorder(place.model, place.run_dir, recorded, place.problems)
        losses = LossFlags(place.tensors, incidents.guard)
    if options.dump is not None:
        if place.group.incomplete is not None:
            options.dump.dump_alone(place.group)
        dumps = WatchedDumps(options.dump, place.model, len(place.optimizers), place.problems)
        if _dumps_bad_steps(options.dump) and place.is_judged_late:
            dumps.keep_gradients(place.tensors, options.quiet)
        if health is None and options.dump.dump_on is not None:
            place.problems.report(
                "dump-on", "dump_on dumps what is judged bad, but health=False judges nothing"
            )
    return WatchedInstruments(health, signals, incidents, dumps, losses)


def _health_options(
    place: Workplace, options: WatchOptions, checks: Sequence[CheckSettings]
) -> HealthOptions:
    closer_looks = CloserLooks(place.opened.first_step)
    early = _dumps_bad_steps(options.dump) and not place.is_judged_late
    return HealthOptions(checks, closer_looks, early=early)


def _make_signals(place: Workplace, options: WatchOptions) -> TrainingSignals:
    noticing = Guard(place.problems, "signals", "Gradsight no longer sees losses and batches")
    first_look = None
    why = _why_no_first_look(place, options)
    if why is None:
        first_look = FirstLook(
            place.model,
            place.tensors,
            place.inner_optimizers,
            PreflightOptions(is_whole=options.preflight == "whole"),
            Guard(place.problems, "preflight", "the first step could not be examined"),
            Guard(place.problems, "extra passes", "the extra passes of the first step failed"),
        )
    return TrainingSignals(
        place.model,
        place.tensors,
        place.inner_optimizers,
        noticing,
        first_look,
        () if why is None else tuple((signal, why) for signal in FIRST_SIGNALS),
    )


def _why_no_first_look(place: Workplace, options: WatchOptions) -> str | None:
    if options.preflight is False:
        return "the checks of the first step are switched off (preflight=False or --no-preflight)"
    if place.has_begun:
        return "the model got other parameters after its first step, which alone is examined"
    return None


def _recorder_options(
    place: Workplace, options: WatchOptions, rules: Mapping[str, Any]
) -> RecorderOptions:
    return RecorderOptions(
        with_batch=options.recorder == "batch",
        seconds=options.diagnose_seconds,
        rules=rules,
        first=place.group.is_first,
        attached=options.attached,
        quiet=options.quiet or not place.group.is_first,
    )


def _dumps_bad_steps(dumper: GradientDumper | None) -> bool:
    return dumper is not None and dumper.enabled and dumper.dump_on is not None


def measuring_plan(
    place: Workplace, options: WatchOptions, instruments: WatchedInstruments
) -> MeasuringPlan:
    """What is measured at which step."""
    opened = place.opened
    health = instruments.health
    known_early = health is not None and health.early is not None
    actions = options.actions()
    skips = actions is not None and actions.includes(SKIP)
    return MeasuringPlan(
        first_step=opened.first_step,
        norms=options.stats,
        histograms=options.histograms,
        closer_looks=None if health is None else CloserLooks(opened.first_step),
        unit_rows=() if health is None else health.unit_rows,
        experts=expert_groups(place.model, place.parameters),
        on_every_rank=instruments.incidents is not None or known_early or skips,
        every_step=skips,
        at_once=known_early,
    )
