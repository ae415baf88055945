"""One watched process below `gradsight check` or `gradsight run`.

Opens a watch when backward first runs for a new optimizer, unless the script, or the callback that
was put into its trainer, watches that optimizer already.
"""

import atexit
import contextlib
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradsight.attach.models import has_scheduler, models_of, roots, together, without_average
from gradsight.attach.names import name_of
from gradsight.attach.networks import KnownOptimizer, Networks
from gradsight.attach.step_calls import frame_of_construction, frame_outside_wrappers
from gradsight.core import moments, rundir
from gradsight.core.files import remove_if_empty, write_text
from gradsight.core.group import launched_rank, processes_apart, rank
from gradsight.core.guard import Guard, register_at_fork
from gradsight.core.hooks import put_hook
from gradsight.core.open_watches import open_watch_of
from gradsight.core.optimizers import calls_of_step, innermost_optimizer, wrapped_optimizers
from gradsight.core.passes import BackwardPass
from gradsight.core.problems import show_lines_of_the_script
from gradsight.core.sharing import reshard
from gradsight.core.source import users_frames
from gradsight.core.switch import is_switched_off
from gradsight.errors import RunError, UsageError
from gradsight.first_step.recorder import RECORDER
from gradsight.health.registry import CHECKS
from gradsight.incidents.ending import broken_loss, running
from gradsight.session.options import WatchOptions
from gradsight.session.preflight import preflight_codes
from gradsight.session.shutdown import ShutdownHooks
from gradsight.session.watch_session import Watch
from gradsight.values.adapters import is_of_an_adapter
from gradsight.values.networks import UnmovedNetwork
from gradsight.values.steps import Schedule

_COPIES = 2
"""Copies of watched models that get a record of their own."""
_MANY_COPIES = (
    "gradsight: this script keeps training new copies of a model that is recorded already. Steps "
    "of further copies are not recorded."
)


class Enough(SystemExit):
    """As many steps were made as were asked for. Not an error: the process ends with code 0."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True, slots=True)
class Told:
    """What the command has told this process, by the environment."""

    run_dir: Path
    keep: bool = False
    """Whether the record is what the user wants: `gradsight run`. Else it is made to be judged."""
    steps: int | None = None
    health: str | None = None
    stop_on: str | None = None
    preflight: bool = True
    first_step_only: bool = False
    """Whether nothing is judged but what a first step decides: `gradsight preflight`."""

    def options(self) -> dict[str, Any]:
        """The options of the watches that are opened."""
        # `check` prints every finding when the script has ended; `run` leaves the output alone.
        options: dict[str, Any] = {"health": self.health or True, "quiet": True}
        if self.first_step_only:
            wanted = preflight_codes()
            options["health"] = {code: False for code in CHECKS if code not in wanted}
        if not self.keep:
            options["histograms"] = Schedule(step_interval=25)
            # Its script runs to be judged, so that it may take its time.
            options["preflight"] = "whole" if self.preflight else False
        if self.stop_on == "critical":
            options["on_finding"] = {"critical": "stop"}
        elif self.stop_on == "warning":
            options["on_finding"] = "stop"
        return options


@dataclass(slots=True)
class _Known:
    """An optimizer of the script, as the report describes it."""

    reference: weakref.ref[Optimizer]
    kind: str
    made: tuple[str, int] | None
    model: str | None = None
    stepped_at: tuple[str, int] | None = None
    lr: Any = None
    scheduler: bool | None = None
    steps: int = 0
    is_wrapper: bool = False
    """Whether it leaves the update to an optimizer that it holds."""

    def notice_rate(self) -> None:
        """Update the largest learning rate that the optimizer or its schedule has had so far."""
        optimizer = self.reference()
        if optimizer is None or self.stepped_at is None:
            return
        names = ("lr", "initial_lr", "max_lr")
        rates = [group.get(name) for group in optimizer.param_groups for name in names]
        known = [rate for rate in (*rates, self.lr) if isinstance(rate, (int, float))]
        self.lr = max(known, default=None)

    def plain(self) -> dict[str, Any]:
        """Return what script.json says."""
        described: dict[str, Any] = {"optimizer": self.kind, "made": self.made, "model": self.model}
        if self.stepped_at is not None:
            described |= {"steps": self.stepped_at, "lr": self.lr, "scheduler": self.scheduler}
        return {key: value for key, value in described.items() if key != "model" or value}


class Session:
    """Notices optimizers, watches what they train, and stops the script when it has made enough
    steps.
    """

    def __init__(self, given: Told, was_loaded: Callable[[nn.Module], bool]) -> None:
        self._run_dir = given.run_dir
        self._told = given
        self._forked = False
        self._new: list[Optimizer] = []
        self._watches: list[Watch] = []
        self._watched: list[tuple[Watch, set[int]]] = []
        """The same, each with the ids of the parameters that it watches."""
        self._groups: list[_Shared] = []
        self._copies = 0
        self._processes_apart = 0
        """How many processes were launched together without a process group; 0 otherwise."""
        self._names: list[str] = []
        self._known: list[_Known] = []
        self._by_id: dict[int, _Known] = {}
        self._places: set[tuple[int, int, int]] = set()
        self._new_folders: list[Path] = []
        """Where there was no run before this process opened one."""
        guard = Guard(None, "check", "this script is no longer watched")
        self._guard = guard
        self._looking = Guard(None, "networks", "networks without an optimizer are not noticed")
        self._networks = Networks(self._looking, was_loaded)
        self._stepped_by_scaler: set[int] = set()
        self._is_cut = False
        self._has_compared = False
        self._until_opened = Guard(None, "ending", "how this script ended is not known")
        self._reports_failures = False
        # Before any watch registers its own: hooks of this kind run in reverse order.
        atexit.register(guard.run, self._finish)
        moments.listen(self, guard)
        # Counted by the global hook: the optimizer may be stepped before anything is watched.
        put_hook(guard, register_optimizer_step_pre_hook, self._steps)
        put_hook(guard, register_optimizer_step_post_hook, self._stepped)
        register_at_fork(after_in_child=partial(guard.run, self._let_go))

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """An optimizer has just been made."""
        self._new.append(optimizer)
        if not self._reports_failures and not self._watches:
            self._reports_failures = True
            self._guard.run(ShutdownHooks, _Unopened(self._failed), self._until_opened)
        self._guard.run(self._record_passes, optimizer)
        made = _place(frame_of_construction())
        known = _Known(weakref.ref(optimizer), type(optimizer).__name__, made)
        self._known.append(known)
        self._by_id[id(optimizer)] = known
        self._places = {place for place in self._places if place[0] != id(optimizer)}

    def models_of_optimizers(self) -> list[nn.Module]:
        """The models whose parameters are in an optimizer."""
        optimizers = [known.reference() for known in self._known]
        modules = roots()
        return [
            model
            for optimizer in optimizers
            if optimizer is not None
            for model in models_of(optimizer, modules)[0]
        ]

    def _known_of(self, optimizer: Optimizer) -> _Known | None:
        known = self._by_id.get(id(optimizer))
        # The id may be that of one that is gone.
        return known if known is not None and known.reference() is optimizer else None

    def _record_passes(self, optimizer: Optimizer) -> None:
        """Have the first pass seen from its first call: the watch is opened at its backward."""
        if self._told.preflight and not self._told.keep and not is_switched_off():
            models, _ = models_of(optimizer, roots())
            RECORDER.hold(self, models)

    def _let_go(self) -> None:
        """In a forked child: what the parent trains is the parent's.

        What is new here gets a directory of its own.
        """
        self._forked = True
        self._watches = []
        for known in self._known:
            known.steps = 0

    def _finish(self) -> None:
        """The process ends, and all watches are closed: what has no step is not kept."""
        if self._forked or rank() != 0:
            return
        if any(known.steps for known in self._known):
            self._describe()
            for watched in self._watches[1:]:
                if watched.step_under_way == 0 and watched.run_dir is not None:
                    _forget(watched.run_dir)
        else:
            for folder in self._new_folders:
                _forget(folder)

    def _compare_networks(self) -> None:
        """The script ends, and the watches are open: which networks were forgotten?"""
        watched = [each for each in self._watches if each.is_open and each.step_under_way]
        was_cut = self._is_cut or hasattr(sys, "last_exc")
        if not watched or not self._networks.are_known(was_cut) or self._told.first_step_only:
            return
        if self._has_compared:
            return  # at exit this runs once for each watch, and some are closed by then
        self._has_compared = True
        unmoved = self._networks.unmoved(was_cut)
        for each in watched:
            name = self._names[self._watches.index(each)]
            each.compare_networks([one for one in unmoved if self._home_of(one) == name])

    def _home_of(self, network: UnmovedNetwork) -> str:
        """Return the model in whose record a network is reported."""
        stepped = [
            name
            for name, each in zip(self._names, self._watches, strict=True)
            if each.is_open and each.step_under_way
        ]
        if network.home in stepped:
            return str(network.home)
        return stepped[0]

    # What torch tells.

    def before_backward(self, tensors: Any) -> None:
        """A backward pass begins: whatever has an optimizer by now is trained by it."""
        self._open_new()
        if self._networks.is_looking:
            self._looking.run(self._networks.before_backward)

    def after_backward(self, begun: BackwardPass, rows: Sequence[int]) -> None:
        """It has returned."""
        if self._networks.is_looking:
            self._looking.run(self._look_after_pass)

    def scaler_steps(self, optimizer: Optimizer) -> None:
        """A GradScaler steps an optimizer, or leaves the step out."""
        self._stepped_by_scaler.add(id(innermost_optimizer(optimizer)))

    def _idle(self) -> list[KnownOptimizer]:
        """Return the optimizers that have never stepped."""
        return [
            each
            for known, each in self._living()
            if not known.steps and id(each.optimizer) not in self._stepped_by_scaler
        ]

    def _living(self) -> Iterator[tuple[_Known, KnownOptimizer]]:
        """Yield the script's optimizers that still exist, except wrappers."""
        for known in self._known:
            optimizer = known.reference()
            if optimizer is None or known.is_wrapper:
                continue
            model = next(
                (
                    model
                    for group in self._groups
                    if any(optimizer is each for each in group.optimizers)
                    for model in group.models
                ),
                None,
            )
            made = None if known.made is None else f"{Path(known.made[0]).name}:{known.made[1]}"
            yield known, KnownOptimizer(known.kind, made, optimizer, model, known.model)

    def _look_after_pass(self) -> None:
        self._networks.look(self._idle(), after_pass=True)

    def _count_for_networks(self, optimizer: Optimizer, known: _Known) -> None:
        if self._networks.stepped(optimizer, known.steps == 1):
            watched = {each for _, tensors in self._watched for each in tensors}
            step = known.steps - 1
            moving = [each for known, each in self._living() if known.steps]
            self._networks.begin_look(step, roots(), watched, self._idle(), moving)

    def _steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step, maybe without any backward pass before."""
        if any(optimizer is new for new in self._new):
            self._open_new()

    def _failed(self, where: BaseException | FrameType) -> None:
        """Open the watches if the script fails before its first pass because of its loss."""
        held = [
            tensor
            for optimizer in self._new
            for group in optimizer.param_groups
            for tensor in group["params"]
        ]
        if self._forked or broken_loss(running(where), held) is None:
            return
        self._open_new()
        for each in self._watches:
            each.script_failed(where)

    def _open_new(self) -> None:
        if not self._new:
            return
        # From here on, each watch has its own shutdown hooks.
        self._until_opened.close()
        new = self._new
        self._new = []
        try:
            self._open(new)
            # Whoever was opened holds the recorder by itself now.
            RECORDER.let_go(self)
        except Exception as error:
            print(
                f"gradsight: cannot watch this script: {type(error).__name__}: {error}",
                file=sys.stderr,
            )

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        known = self._known_of(optimizer)
        if known is None or calls_of_step(optimizer) > 1:
            return
        known.steps += 1
        self._looking.run(self._count_for_networks, optimizer, known)
        self._notice_place(optimizer, known)
        steps = self._told.steps
        is_enough = steps is not None and self._steps_made(known) >= steps
        if is_enough or any(each.asked_to_stop is not None for each in self._watches):
            self._is_cut = True
            self._looking.run(self._compare_networks)
            for each in self._watches:
                each.close()
            raise Enough

    def _steps_made(self, known: _Known) -> int:
        """Return the steps of an optimizer's model, also with those that it took the place of."""
        if known.model not in self._names:
            return known.steps
        watched = self._watches[self._names.index(known.model)]
        return max(known.steps, watched.step_under_way)

    def _notice_place(self, optimizer: Optimizer, known: _Known) -> None:
        """Describe an optimizer when it steps at a place of the script for the first time."""
        frame = next(users_frames(), None)
        place = (id(optimizer), 0, 0)
        if frame is not None:
            place = (id(optimizer), id(frame.f_code), frame.f_lasti)
        if place in self._places:
            return
        self._places.add(place)
        try:
            known.stepped_at = known.stepped_at or _place(frame_outside_wrappers())
            known.notice_rate()
            known.scheduler = has_scheduler(optimizer)
            self._describe()
        except Exception as error:  # nothing of ours may reach the script
            print(
                f"gradsight: cannot describe an optimizer: {type(error).__name__}: {error}",
                file=sys.stderr,
            )

    # Opening.

    def _open(self, optimizers: list[Optimizer]) -> None:
        """One watch for all optimizers that share a model.

        Several models of one optimizer are watched together. An optimizer that wraps another does
        not count: what it wraps was made too.
        """
        for each in optimizers:
            self._note_wrapped(each)
        wrappers = [each for each in optimizers if wrapped_optimizers(each)]
        optimizers = [each for each in optimizers if each not in wrappers]
        groups = [group for group in _sharing_models(optimizers) if not self._is_adopted(group)]
        # `check` judges by a record of its own, whatever else the script keeps.
        if self._told.keep:
            groups = [group for group in groups if not self._is_watched(group)]
        groups = self._without_many_copies(groups)
        if self._told.keep and groups:
            first, *others = groups
            copies = [group for group in others if group.is_copy_of(first)]
            joined = _all_in_one([each for each in groups if each not in copies])
            groups = [joined, *copies]
        for group in groups:
            self._open_one(group)
        for watched in self._watches[: -len(groups) or None]:
            for optimizer in optimizers:
                watched.also_optimized_by(optimizer)
        for watched in self._watches:
            for wrapper in wrappers:
                # ZeroRedundancyOptimizer holds more parameters than the optimizer inside it.
                watched.also_optimized_by(wrapper, is_wrapper=True)

    def _note_wrapped(self, optimizer: Optimizer) -> None:
        """Describe an optimizer that others wrap together with these."""
        known = self._known_of(optimizer)
        for each in wrapped_optimizers(optimizer):
            inner = self._known_of(each)
            if known is not None and inner is not None:
                known.is_wrapper = True
                inner.kind = f"{inner.kind} inside {known.kind}"

    def _is_adopted(self, group: "_Shared") -> bool:
        """Whether these are new optimizers of what is watched already: its record goes on."""
        held = {id(tensor) for tensor in group.parameters()}
        for watched, tensors in self._watched:
            if held and held <= tensors and watched.is_open:
                for optimizer in group.optimizers:
                    watched.add_optimizer(optimizer)
                self._note_model(group.optimizers, self._names[self._watches.index(watched)])
                return True
        return False

    def _without_many_copies(self, groups: "list[_Shared]") -> "list[_Shared]":
        """Copies of a model that come and go, as in meta-learning, would be a record each."""
        kept = []
        for group in groups:
            is_copy = any(group.is_copy_of(other) for other in self._groups)
            self._copies += is_copy
            if is_copy and self._copies > _COPIES:
                if self._copies == _COPIES + 1:
                    print(_MANY_COPIES, file=sys.stderr)
                continue
            kept.append(group)
        self._groups += kept
        return kept

    def _is_watched(self, group: "_Shared") -> bool:
        """Whether the script watches these itself; its record can then be found at ours too."""
        tensors = [
            tensor
            for optimizer in group.optimizers
            for each in optimizer.param_groups
            for tensor in each["params"]
        ]
        known = open_watch_of(tensors)
        if known is None:
            return False
        if known.run_dir is not None and rank() == 0 and not self._forked:
            _lead_to(self._run_dir, known.run_dir)
        return True

    def _open_one(self, group: "_Shared") -> None:
        model = together(group.models, group.tensors)
        name = name_of(group.models, group.tensors, self._names)
        self._processes_apart = processes_apart()
        if self._processes_apart and launched_rank():
            # This process shares nothing with rank 0, so it gets a folder of its own.
            name = f"{name}-rank{launched_rank()}"
            folder = self._run_dir / name
        else:
            folder = self._run_dir if not self._watches else self._run_dir / name
        if self._forked:
            folder = self._run_dir / f"{name}-{os.getpid()}"
        if self._told.keep and not rundir.is_run(folder):
            self._new_folders.append(folder)
        try:
            watched = self._watch(model, group.optimizers, folder)
        except RunError:
            name = f"{name}-{os.getpid()}"
            watched = self._watch(model, group.optimizers, self._run_dir / name)
        except UsageError as error:
            print(f"gradsight: {name} is not watched: {error}", file=sys.stderr)
            return
        if self._watches and self._told.keep:
            print(f"gradsight: {name} is recorded apart, in {watched.run_dir}", file=sys.stderr)
        # Hooks of this kind run in reverse order: before the watch is closed by its own.
        atexit.register(self._looking.run, self._compare_networks)
        self._networks.opened(group.models, name)
        self._names.append(name)
        self._watches.append(watched)
        held = {id(tensor) for tensor in model.parameters()}
        self._watched.append((watched, held))
        self._note_model(group.optimizers, name)

    def _note_model(self, optimizers: list[Optimizer], name: str) -> None:
        for optimizer in optimizers:
            known = self._known_of(optimizer)
            if known is not None:
                known.model = name

    def _watch(self, model: Any, optimizers: list[Optimizer], folder: Path) -> Watch:
        # An exception out of optimizer.step() would be the script's failure.
        options = WatchOptions(
            run_dir=folder, stop_raises=False, attached=True, **self._told.options()
        )
        return Watch(model, optimizers, options)

    @property
    def has_watched(self) -> bool:
        """Whether a watch was opened in this process."""
        return bool(self._watches) or self._forked

    def _describe(self) -> None:
        """Write down what is known of the optimizers, for the report; rank 0 does."""
        if rank() != 0 or launched_rank() != 0 or self._forked:
            return
        plain: list[dict[str, Any]] = []
        for known in self._known:
            if known.is_wrapper:
                continue
            known.notice_rate()
            described = known.plain()
            if self._processes_apart:
                described["processes_apart"] = self._processes_apart
            # One that is made in every epoch is described once.
            if described not in plain:
                plain.append(described)
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            text = json.dumps(plain, indent=1, default=str)
            write_text(self._run_dir / rundir.SCRIPT, text)
        except OSError as error:
            print(
                f"gradsight: {self._run_dir} cannot be written: {error.strerror}",
                file=sys.stderr,
            )


@dataclass(frozen=True, slots=True)
class _Unopened:
    """Gets notified if a script ends before any watch is open."""

    failed: Callable[[BaseException | FrameType], None]

    def close_at_exit(self) -> None:
        """Do nothing: no watch is open."""

    def detach_in_child(self) -> None:
        """Do nothing: no watch is attached."""

    def ended_by(self, error: BaseException) -> None:
        """An exception that nobody has caught ends the process."""
        self.failed(error)

    def given_up(self, frame: FrameType) -> None:
        """Handle a call of sys.exit(), exit() or quit() with an error status."""
        self.failed(frame)


def _place(frame: FrameType | None) -> tuple[str, int] | None:
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _forget(folder: Path) -> None:
    """Remove the beginnings of a record in which nothing was recorded."""
    for name in (rundir.RECORD, rundir.TAIL, rundir.CONFIG, rundir.SCRIPT):
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    remove_if_empty(folder)


def _all_in_one(groups: "list[_Shared]") -> "_Shared":
    """One record for all that a script trains."""
    return _Shared(
        [model for group in groups for model in group.models],
        [tensor for group in groups for tensor in group.tensors],
        [optimizer for group in groups for optimizer in group.optimizers],
    )


def _lead_to(place: Path, record: Path) -> None:
    """Let the place that the command was given lead to the record that the script keeps itself."""
    if place.resolve() == record or (place.is_dir() and any(place.iterdir())):
        return
    with contextlib.suppress(OSError):
        if place.is_dir():
            place.rmdir()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(record, target_is_directory=True)


@dataclass(slots=True)
class _Shared:
    """Optimizers that train the same models, and so are watched together."""

    models: list[Any]
    tensors: list[Any]
    """Parameters that belong to no model that was found."""
    optimizers: list[Optimizer]

    def parameters(self) -> list[Any]:
        """What the optimizers hold."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [tensor for group in groups for tensor in group["params"]]

    def is_copy_of(self, other: "_Shared") -> bool:
        """Whether the models are the same in every weight: made by copying, and not trained yet."""
        if self.tensors or len(self.models) != 1 or len(other.models) != 1:
            return False
        mine = dict(self.models[0].named_parameters())
        others = dict(other.models[0].named_parameters())
        if mine.keys() != others.keys() or self.models[0] is other.models[0]:
            return False
        return all(
            tensor.shape == others[name].shape
            and tensor.device == others[name].device
            and torch.equal(tensor, others[name])
            for name, tensor in mine.items()
        )

    def shares_a_model_with(self, models: list[Any]) -> bool:
        return any(model is other for model in models for other in self.models)


def _sharing_models(optimizers: list[Optimizer]) -> list[_Shared]:
    """The optimizers by the models that they share, each optimizer in exactly one group."""
    candidates = roots()
    for model in candidates:
        # FSDP2 leaves the outermost parameters whole between forward and backward.
        reshard(model)
    groups: list[_Shared] = []
    for optimizer in optimizers:
        models, tensors = models_of(optimizer, candidates)
        models = [
            model if RECORDER.has_called(model) else without_average(model, optimizer)
            for model in models
        ]
        merged = _Shared([], [], [])
        separate = []
        for group in groups:
            if group.shares_a_model_with(models):
                merged.models += group.models
                merged.tensors += group.tensors
                merged.optimizers += group.optimizers
            else:
                separate.append(group)
        merged.models += [
            model for model in models if all(model is not other for other in merged.models)
        ]
        merged.tensors += tensors
        merged.optimizers.append(optimizer)
        groups = [*separate, merged]
    return groups


_sessions: list[Session] = []


def note_frozen_models(options: str | None = None) -> None:
    """The process ends: if nothing was watched because nothing can learn, note that."""
    if any(session.has_watched for session in _sessions):
        return
    held = [model for session in _sessions for model in session.models_of_optimizers()]
    models = [model for model in held or roots() if next(model.parameters(), None) is not None]
    if not models or any(each.requires_grad for model in models for each in model.parameters()):
        return
    largest = max(models, key=lambda model: sum(each.numel() for each in model.parameters()))
    names = [name for name, _ in largest.named_parameters()]
    note = {
        "optimizer": "none",
        "frozen": type(largest).__name__,
        "adapters": any(map(is_of_an_adapter, names)),
    }
    file = told(options).run_dir / rundir.SCRIPT
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps([note, *known], indent=1))


def told(text: str | None = None) -> Told:
    """Return the options of the command that started this script: `text`, or its environment."""
    given = json.loads(text or os.environ["GRADSIGHT_CHECK"])
    return Told(**{**given, "run_dir": Path(given["run_dir"])})


def optimizer_made(
    optimizer: Optimizer,
    options: str | None = None,
    was_loaded: Callable[[nn.Module], bool] = lambda module: False,
) -> None:
    """Called by sitecustomize for every optimizer that a script makes.

    options: those of the command, if the environment may no longer have them.
    was_loaded: whether load_state_dict has given a module its weights.
    """
    if not _sessions:
        show_lines_of_the_script()
        _sessions.append(Session(told(options), was_loaded))
    _sessions[0].optimizer_made(optimizer)
