"""Lightning's Trainer, by whichever of its two names it was imported."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from gradsight.errors import MissingPackage
from gradsight.integrations.door import Door
from gradsight.integrations.logger_sink import LoggerSink
from gradsight.memory.monitor import MemoryMonitor

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_IN_CHECKPOINTS = "gradsight"
"""Our key in a checkpoint; whoever loads it without us passes over it."""


def _callback_classes() -> list[type]:
    """Lightning's `Callback`, of both packages where a script has loaded both.

    They hold the same code, but each knows only its own classes.
    """
    names = [name for name in _PACKAGES if sys.modules.get(name)]
    if not names:
        names = [name for name in _PACKAGES if find_spec(name.partition(".")[0])][:1]
    if not names:
        raise MissingPackage("lightning", "lightning", "gradsight.integrations.lightning")
    return [import_module(name).Callback for name in names]


class _OfBothPackages(*_callback_classes()):  # type: ignore[misc]
    """A callback that is also one of a package which was imported after this module."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """An instance of the class, with the bases that it lacks by now."""
        late = [each for each in _callback_classes() if not issubclass(cls, each)]
        made: Any = cls
        if late:
            # By its own name still: Lightning keeps the state of callbacks under it.
            names = {"__qualname__": cls.__qualname__, "__module__": cls.__module__}
            made = type(cls.__name__, (cls, *late), {**names, "_declared": cls})
        instance: Self = object.__new__(made)
        return instance

    def __reduce__(self) -> Any:
        """By the class that has a name; processes that Lightning spawns get a copy."""
        return _made_again, (getattr(self, "_declared", type(self)), self.__dict__)


def _made_again(declared: Any, state: dict[str, Any]) -> Any:
    made = declared.__new__(declared)
    made.__dict__.update(state)
    return made


class GradsightCallback(_OfBothPackages):
    """Watches what the Trainer trains, from the first step of `fit` to the last.

        trainer = Trainer(..., callbacks=[GradsightCallback()])

    run_dir: where the record goes; None is `default_root_dir/gradsight`.
    options: those of `gradsight.watch`. `sinks` are by default the Trainer's own loggers; steps are
      numbered by `global_step`. Several optimizers (manual optimization) make one step together,
      however many of Lightning's that is.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__()
        self._door = Door(run_dir, options)
        self._sink = LoggerSink()
        self._resumed: dict[str, int] = {}

    @property
    def watch(self) -> Any:
        """The open `Watch`, for `log` and `report`; None where nothing is being trained."""
        return self._door.watch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the watch: the optimizers are there, and a checkpoint is loaded."""
        callbacks = [each for each in trainer.callbacks if isinstance(each, GradsightCallback)]
        # The user's own come before those that others have put in.
        if callbacks and callbacks[0] is not self:
            return
        self._door.open(
            trainer.strategy.model,
            trainer.optimizers,
            run_dir=self._door.run_dir or Path(trainer.default_root_dir) / "gradsight",
            sinks=[self._sink] if trainer.loggers else [],
            start_step=self._first_step(trainer),
        )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hand steps to the loggers; stop where an action of the user's asks for it."""
        self._hand_over(trainer)
        if self._door.should_stop():
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the watch."""
        self._close(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the watch: the record says what ended it."""
        self._close(trainer, exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the watch, if nothing else has."""
        self._close(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the number of the next step: with several optimizers nothing else tells it."""
        if self._door.watch is not None:
            step = self._door.watch.step_under_way
            checkpoint[_IN_CHECKPOINTS] = {"step": step, "global_step": trainer.global_step}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Remember it until training begins."""
        self._resumed = checkpoint.get(_IN_CHECKPOINTS, {})

    def _first_step(self, trainer: Any) -> int:
        global_step = int(trainer.global_step)
        several = len(trainer.optimizers)
        if several <= 1:
            return global_step
        # A checkpoint may have been loaded for something else, such as a validation.
        if self._resumed.get("global_step") == global_step:
            return self._resumed["step"]
        return global_step // several

    def _close(self, trainer: Any, error: BaseException | None = None) -> None:
        self._door.close(error)
        self._hand_over(trainer)

    def _hand_over(self, trainer: Any) -> None:
        self._sink.hand_over({id(logger): logger.log_metrics for logger in trainer.loggers})


class MemoryMonitorCallback(_OfBothPackages):
    """Adds memory to Lightning's logged metrics, every `log_every_n_steps` steps.

    `trainer.logged_metrics` has it, and every logger. The names and units are those of
    `gradsight.MemoryMonitor`: memory/gpu_allocated_gb, memory/gpu_reserved_gb and
    memory/gpu_max_allocated_gb on a GPU, elsewhere memory/rss_gb, memory/peak_rss_gb and
    memory/tensor_gb.
    """

    def __init__(self) -> None:
        super().__init__()
        self._monitor = MemoryMonitor()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log memory where Lightning is about to write what was logged."""
        # Nothing public says when that is: steps and batches differ with several optimizers.
        if trainer._logger_connector.should_update_logs or trainer.fast_dev_run:
            memory = self._monitor.sample(None, trainer.global_step)
            pl_module.log_dict(memory, on_step=True, on_epoch=False, batch_size=1)
