"""Lightning's Trainer, by whichever of its two names it was imported."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gradsight.errors import MissingPackage
from gradsight.memory.monitor import MemoryMonitor

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


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


class MemoryMonitorCallback(*_callback_classes()):  # type: ignore[misc]
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
