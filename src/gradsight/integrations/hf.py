"""Hugging Face's Trainer, and those that derive from it, such as TRL's."""

from typing import Any

from gradsight.errors import MissingPackage
from gradsight.memory.monitor import MemoryMonitor

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingPackage("transformers", "hf", "gradsight.integrations.hf") from error


class MemoryMonitorCallback(TrainerCallback):  # type: ignore[misc]
    """Adds memory to what the Trainer logs of training, every `logging_steps` steps.

    `trainer.state.log_history` has it, and trainer_state.json. The names and units are those of
    `gradsight.MemoryMonitor`: memory/gpu_allocated_gb, memory/gpu_reserved_gb and
    memory/gpu_max_allocated_gb on a GPU, elsewhere memory/rss_gb, memory/peak_rss_gb and
    memory/tensor_gb. Callbacks that come after this one see it too; the Trainer puts its own
    reporters (W&B, TensorBoard) before the user's callbacks.
    """

    def __init__(self) -> None:
        self._monitor = MemoryMonitor()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: object
    ) -> None:
        """Add memory to the entry of a training step."""
        # Evaluations and the summary come here too, in the very dict that is returned to the user.
        if not logs or "loss" not in logs:
            return
        memory = self._monitor.sample(None, state.global_step)
        logs.update(memory)
        # The Trainer has made the entry from a copy of these logs already.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(memory)
