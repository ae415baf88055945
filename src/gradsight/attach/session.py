"""One watched process below `gradsight check`: opens a watch when backward first runs for a new
optimizer.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradsight.attach.models import distinct, models_of, name_of, roots, together
from gradsight.core import moments as interception
from gradsight.core import rundir
from gradsight.core.files import write_text
from gradsight.core.group import rank
from gradsight.core.source import users_place
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
        self._run_dir, self._steps, self._health = run_dir, steps, health
        self._forked = False
        self._new: list[Optimizer] = []
        self._watches: list[Watch] = []
        self._names: list[str] = []
        self._known: list[dict[str, Any]] = []
        self._made: dict[int, int] = {}
        interception.observe(self)
        interception.around_backward(self._before_backward, lambda: None)
        register_optimizer_step_post_hook(self._stepped)
        os.register_at_fork(after_in_child=self._let_go)

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """An optimizer has just been made."""
        self._new.append(optimizer)
        self._known.append(
            {"optimizer": type(optimizer).__name__, "made": users_place(), "id": id(optimizer)}
        )

    def _let_go(self) -> None:
        """In a forked child: what the parent trains is the parent's; what is new here gets a
        directory of its own.
        """
        self._forked = True
        self._watches, self._made = [], {}

    # What torch tells.

    def after_backward(self) -> None:
        pass

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        pass

    def unscaled(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        pass

    def scaler_steps(self, optimizer: Optimizer) -> None:
        pass

    def scaler_stepped(self, optimizer: Optimizer) -> None:
        pass

    def _before_backward(self, tensors: Any) -> None:
        if self._new:
            new, self._new = self._new, []
            try:
                self._open(new)
            except Exception as error:
                print(
                    f"gradsight: cannot watch this script: {type(error).__name__}: {error}",
                    file=sys.stderr,
                )

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        made = self._made[id(optimizer)] = self._made.get(id(optimizer), 0) + 1
        if made == 1:
            self._describe(optimizer)
        if self._steps is not None and made >= self._steps:
            for each in self._watches:
                each.close()
            raise Enough

    # Opening.

    def _open(self, optimizers: list[Optimizer]) -> None:
        """One watch for all optimizers that share a model; several models of one optimizer are
        watched together.
        """
        candidates = roots()
        groups: list[tuple[list[Any], list[Any], list[Optimizer]]] = []
        for optimizer in optimizers:
            models, tensors = models_of(optimizer, candidates)
            shared = [
                group
                for group in groups
                if any(model is other for model in models for other in group[0])
            ]
            for group in shared:
                groups.remove(group)
                models = [
                    *group[0],
                    *(model for model in models if all(model is not other for other in group[0])),
                ]
                tensors = [*group[1], *tensors]
                optimizer_list = [*group[2], optimizer]
            groups.append((models, tensors, optimizer_list if shared else [optimizer]))
        for models, tensors, members in groups:
            self._open_one(together(models, tensors), members)
        for each in self._watches[: -len(groups) or None]:
            for optimizer in optimizers:
                each.know(optimizer)

    def _open_one(self, model: Any, optimizers: list[Optimizer]) -> None:
        name = distinct(
            [*self._names, name_of(model, "model" if type(model) is torch.nn.Module else None)]
        )[-1]
        folder = self._run_dir if not self._names else self._run_dir / name
        if self._forked:
            folder = self._run_dir / f"{name}-{os.getpid()}"
        self._names.append(name)
        options: dict[str, Any] = {
            "histograms": Schedule(step_interval=25),
            "health": self._health or True,
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

    def _describe(self, optimizer: Optimizer) -> None:
        """Write down what is known of this optimizer, for the report; rank 0 does."""
        for known in self._known:
            if known["id"] == id(optimizer):
                known["steps"] = users_place()
                known["lr"] = (
                    optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
                )
                known["scheduler"] = hasattr(optimizer.step, "_wrapped_by_lr_sched")
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


_sessions: list[Session] = []


def optimizer_made(optimizer: Optimizer) -> None:
    """Called by sitecustomize for every optimizer that a script makes."""
    if not _sessions:
        told = json.loads(os.environ["GRADSIGHT_CHECK"])
        _sessions.append(Session(Path(told["run_dir"]), told["steps"], told["health"]))
    _sessions[0].optimizer_made(optimizer)
