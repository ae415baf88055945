"""What every door does: it opens a watch with the loss of its steps, or says why it cannot."""

import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from gradsight.core.group import rank
from gradsight.core.notices import notice
from gradsight.core.optimizers import optimizer_list
from gradsight.core.switch import is_switched_off
from gradsight.errors import CannotBeSeen, UsageError
from gradsight.integrations.step_loss import StepLoss
from gradsight.session.options import WatchOptions
from gradsight.session.watch_session import Watch
from gradsight.session.watching import open_watch, watch

_OWN = {"model", "optimizer", "run_dir"}
"""Arguments of `watch` that a door fills in itself."""


class Door:
    """A watch that somebody else's trainer opens and closes."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None,
        options: Mapping[str, Any],
        stops_itself: bool = True,
    ) -> None:
        """`stops_itself`: the door ends training where a finding asks for it; none is raised."""
        refuse_unknown_options(options)
        self._stop_raises = not stops_itself
        self.watch: Watch | None = None
        """While it is open."""
        self.run_dir = run_dir
        self.opened_in: Path | None = None
        """Where the record of this watch goes."""
        self.options = dict(options)
        self._loss: StepLoss | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is said on standard error."""
        return bool(self.options.get("quiet", False))

    def open(
        self, model: nn.Module, optimizer: object, hears_loss: bool = True, **defaults: Any
    ) -> Watch | None:
        """Open the watch with these options where the user has given none; None: unwatched.

        One that is still open gives way. `hears_loss`: whether the loss of a step is what its
        backward passes start from; otherwise the door has to tell it.
        """
        earlier = self._let_go()
        if earlier is not None:
            earlier.give_way()
        if is_switched_off():
            return None
        optimizers = optimizer_list(optimizer)
        options = {"run_dir": self.run_dir, **defaults, **self.options}
        self.opened_in = options["run_dir"] and Path(options["run_dir"])
        settings = WatchOptions(stop_raises=self._stop_raises, **options)
        try:
            self.watch = open_watch(model, optimizers, settings)
        except CannotBeSeen as sentence:
            if rank() == 0:
                notice(f"not watched: {sentence}")
            return None
        if hears_loss:
            self._loss = StepLoss(self.watch, model, optimizers)
            self._loss.start()
        return self.watch

    def close(self, error: BaseException | None = None) -> None:
        """Close what is open; `error` is what ended training."""
        opened = self._let_go()
        if opened is not None:
            kind = None if error is None else type(error)
            opened.__exit__(kind, error)

    def _let_go(self) -> Watch | None:
        opened = self.watch
        self.watch = None
        if self._loss is not None:
            self._loss.stop()
            self._loss = None
        return opened

    def should_stop(self) -> bool:
        """Whether an action of the user's has asked for the end of training."""
        return self.watch is not None and self.watch.asked_to_stop is not None


def refuse_unknown_options(options: Mapping[str, Any]) -> None:
    """An error, before anything is trained, for an option that `watch` does not have."""
    known = set(inspect.signature(watch).parameters) - _OWN
    for name in options:
        if name not in known:
            names = ", ".join(sorted(known))
            raise UsageError(f"there is no option {name!r}; those of gradsight.watch are {names}")


def caller_of(kind: type) -> Any:
    """The nearest object of this class whose method is being called.

    Some trainers hand their callbacks everything but themselves.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, kind):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError(f"to be called by a {kind.__module__}.{kind.__qualname__}")
