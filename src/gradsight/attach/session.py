"""One watched process below `gradsight check`.

Opens a watch when backward first runs for a new optimizer.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradsight.attach.models import (
    distinct,
    has_scheduler,
    models_of,
    roots,
    together,
    variable_name,
)
from gradsight.attach.step_calls import step_call
from gradsight.core import moments, rundir
from gradsight.core.files import write_text
from gradsight.core.group import rank
from gradsight.core.source import users_frames, users_place
from gradsight.errors import RunError, UsageError
from gradsight.session.watch_session import Watch, watch
from gradsight.values.steps import Schedule


class Enough(SystemExit):
    """As many steps were made as were asked for. Not an error: the process ends with code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Session:
    """Notices optimizers, watches what they train, and stops the script when it has made enough
    steps.
    """

    def __init__(self, run_dir: Path, steps: int | None, health: str | None) -> None:
        self._run_dir = run_dir
        self._steps = steps
        self._health = health
        self._forked = False
        self._new: list[Optimizer] = []
        self._watches: list[Watch] = []
        self._names: list[str] = []
        self._known: list[dict[str, Any]] = []
        self._made: dict[int, int] = {}
        self._places: set[tuple[int, int, int]] = set()
        moments.listen(self)
        # Counted by the global hook: the optimizer may be stepped before anything is watched.
        register_optimizer_step_post_hook(self._stepped)
        os.register_at_fork(after_in_child=self._let_go)

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """An optimizer has just been made."""
        self._new.append(optimizer)
        self._known.append(
            {"optimizer": type(optimizer).__name__, "made": users_place(), "id": id(optimizer)}
        )

    def _let_go(self) -> None:
        """In a forked child: what the parent trains is the parent's.

        What is new here gets a directory of its own.
        """
        self._forked = True
        self._watches = []
        self._made = {}

    # What torch tells.

    def before_backward(self, tensors: Any) -> None:
        """A backward pass begins: whatever has an optimizer by now is trained by it."""
        if not self._new:
            return
        new = self._new
        self._new = []
        try:
            self._open(new)
        except Exception as error:
            print(
                f"gradsight: cannot watch this script: {type(error).__name__}: {error}",
                file=sys.stderr,
            )

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        made = self._made.get(id(optimizer), 0) + 1
        self._made[id(optimizer)] = made
        self._notice_place(optimizer)
        if self._steps is not None and made >= self._steps:
            for each in self._watches:
                each.close()
            raise Enough

    def _notice_place(self, optimizer: Optimizer) -> None:
        """Describe an optimizer when it steps at a place of the script for the first time."""
        frame = next(users_frames(), None)
        place = (id(optimizer), 0, 0)
        if frame is not None:
            place = (id(optimizer), id(frame.f_code), frame.f_lasti)
        if place in self._places:
            return
        self._places.add(place)
        try:
            self._describe(optimizer, frame)
        except Exception as error:  # nothing of ours may reach the script
            print(
                f"gradsight: cannot describe an optimizer: {type(error).__name__}: {error}",
                file=sys.stderr,
            )

    # Opening.

    def _open(self, optimizers: list[Optimizer]) -> None:
        """One watch for all optimizers that share a model.

        Several models of one optimizer are watched together.
        """
        groups = _sharing_models(optimizers)
        for group in groups:
            self._open_one(together(group.models, group.tensors), group.optimizers)
        for each in self._watches[: -len(groups) or None]:
            for optimizer in optimizers:
                each.also_optimized_by(optimizer)

    def _open_one(self, model: Any, optimizers: list[Optimizer]) -> None:
        name = distinct(
            [
                *self._names,
                variable_name(model, "model" if type(model) is torch.nn.Module else None),
            ]
        )[-1]
        folder = self._run_dir if not self._names else self._run_dir / name
        if self._forked:
            folder = self._run_dir / f"{name}-{os.getpid()}"
        self._names.append(name)
        options: dict[str, Any] = {
            "histograms": Schedule(step_interval=25),
            "health": self._health or True,
            "quiet": True,  # the command prints every finding when the script has ended
        }
        try:
            watched = watch(model, optimizers, run_dir=folder, **options)
        except RunError:
            watched = watch(
                model, optimizers, run_dir=self._run_dir / f"{name}-{os.getpid()}", **options
            )
        except UsageError as error:
            print(f"gradsight: {name} is not watched: {error}", file=sys.stderr)
            return
        self._watches.append(watched)
        for known in self._known:
            if any(known["id"] == id(optimizer) for optimizer in optimizers):
                known["model"] = name

    def _describe(self, optimizer: Optimizer, frame: FrameType | None) -> None:
        """Write down what is known of this optimizer, for the report; rank 0 does."""
        for known in self._known:
            if known["id"] == id(optimizer):
                if frame is not None:
                    known.setdefault("steps", (frame.f_code.co_filename, frame.f_lineno))
                    calls = known.setdefault("step_calls", [])
                    calls.append(asdict(step_call(frame, optimizer)))
                known["lr"] = (
                    optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
                )
                known["scheduler"] = has_scheduler(optimizer)
        if rank() == 0 and int(os.environ.get("RANK", "0")) == 0 and not self._forked:
            plain = [
                {key: value for key, value in known.items() if key != "id"} for known in self._known
            ]
            try:
                self._run_dir.mkdir(parents=True, exist_ok=True)
                text = json.dumps(plain, indent=1, default=str)
                write_text(self._run_dir / rundir.SCRIPT, text)
            except OSError as error:
                print(
                    f"gradsight: {self._run_dir} cannot be written: {error.strerror}",
                    file=sys.stderr,
                )


@dataclass(slots=True)
class _Shared:
    """Optimizers that train the same models, and so are watched together."""

    models: list[Any]
    tensors: list[Any]
    """Parameters that belong to no model that was found."""
    optimizers: list[Optimizer]

    def shares_a_model_with(self, models: list[Any]) -> bool:
        return any(model is other for model in models for other in self.models)


def _sharing_models(optimizers: list[Optimizer]) -> list[_Shared]:
    """The optimizers by the models that they share, each optimizer in exactly one group."""
    candidates = roots()
    groups: list[_Shared] = []
    for optimizer in optimizers:
        models, tensors = models_of(optimizer, candidates)
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


def optimizer_made(optimizer: Optimizer) -> None:
    """Called by sitecustomize for every optimizer that a script makes."""
    if not _sessions:
        told = json.loads(os.environ["GRADSIGHT_CHECK"])
        _sessions.append(Session(Path(told["run_dir"]), told["steps"], told["health"]))
    _sessions[0].optimizer_made(optimizer)
