"""OLMo-core's trainer: one callback.

    trainer_config.with_callback("gradsight", GradsightCallback())

This folder must be on PYTHONPATH. Written for version 3.0.0.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olmo_core.train.callbacks import Callback

from gradsight.integrations.door import Door


@dataclass
class GradsightCallback(Callback):
    """Watches what the trainer trains, from its first step to its last."""

    run_dir: str | None = None
    """Where the record goes; None is `gradsight` in the trainer's save folder."""
    options: dict[str, Any] = field(default_factory=dict)
    """Those of `gradsight.watch`."""

    def __post_init__(self) -> None:
        self._door: Door | None = None

    @property
    def watch(self) -> Any:
        """The open `Watch`; None where nothing is being trained, or nothing can be seen."""
        return None if self._door is None else self._door.watch

    def pre_step(self, batch: dict[str, Any]) -> None:
        """Open the watch at the first step: by then the trainer has made its dry run."""
        # The trainer has counted this step already.
        step = self.trainer.global_step - 1
        if self._door is None:
            self._door = Door(self.run_dir or self._folder(), self.options)
            self._open(step)
        elif self.watch is not None and self.watch.step_under_way != step:
            self._go_to(step)

    def post_step(self) -> None:
        """Stop training where an action of the user's asks for it."""
        if self._door is not None and self._door.should_stop():
            self.trainer.cancel_run("Gradsight: a finding asks for the end of training")

    def on_error(self, exc: BaseException) -> None:
        """Close the watch: the record says what ended it."""
        self._close(exc)

    def close(self) -> None:
        """Close the watch, if nothing else has."""
        self._close(None)

    def _open(self, step: int) -> None:
        if self._door is not None:
            module = self.trainer.train_module
            self._door.open(module.model, module.optim, start_step=step)

    def _go_to(self, step: int) -> None:
        """Steps that are skipped on purpose have numbers too; a loaded checkpoint goes back."""
        if step > self.watch.step_under_way:
            self.watch.go_to(step)
        else:
            self._open(step)

    def _close(self, error: BaseException | None) -> None:
        if self._door is not None:
            self._door.close(error)

    def _folder(self) -> str | None:
        folder = str(self.trainer.save_folder)
        # A bucket's address is no place for a record that grows.
        return None if "://" in folder else str(Path(folder) / "gradsight")
