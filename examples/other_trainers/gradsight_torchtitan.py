"""torchtitan's trainer: an override of its metrics processor, which sees every step begin.

    ... -m torchtitan.train ... --override.imports gradsight_torchtitan.watched

This folder must be on PYTHONPATH; no file of torchtitan changes. Written for version 0.3.0.
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.override import derive, override
from torchtitan.trainer import Trainer

from gradsight.core.group import LeavingProblems
from gradsight.core.guard import Guard
from gradsight.core.shards import local_part
from gradsight.integrations.door import Door, caller_of
from gradsight.integrations.step_loss import loss_group
from gradsight.session.watch_session import Watch


class WatchedMetrics(MetricsProcessor):
    """The metrics processor that a trainer has, with a watch of what it trains."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """As torchtitan's own, and what a watch is told."""

        run_dir: str | None = None
        """Where the record goes; None is `gradsight` in the job's dump folder."""
        options: dict[str, Any] = field(default_factory=dict)
        """Those of `gradsight.watch`."""

    def __init__(self, config: Config, *, dump_folder: str = "./outputs", **kwargs: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **kwargs)
        # A trainer that cannot be asked to stop: stopping is an exception.
        run_dir = config.run_dir or str(Path(dump_folder) / "gradsight")
        self._door = Door(run_dir, config.options, stops_itself=False)
        self._asked = False
        self._losses: _StepLoss | None = None

    @property
    def watch(self) -> Any:
        """The open `Watch`; None where nothing is being trained, or nothing can be seen."""
        return self._door.watch

    def should_log(self, step: int) -> bool:
        """Asked when a step begins: at the first, models and optimizers are there."""
        if not self._asked and self.model_parts is not None:
            self._asked = True
            self._open(step)
        return bool(super().should_log(step))

    def close(self) -> None:
        """Training is over, by itself or by an error."""
        if self._losses is not None:
            self._losses.stop()
        self._door.close()
        super().close()

    def _open(self, step: int) -> None:
        parts = list(self.model_parts or ())
        # Several parts are stages of a pipeline: refused in words, and trained all the same.
        model = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
        sinks = {"wandb": self.config.enable_wandb, "tensorboard": self.config.enable_tensorboard}
        watch = self._door.open(
            model,
            # The container is an optimizer too, of the same parameters; its own ones make the step.
            list(self.optimizers.optimizers),
            # Losses in chunks call backward twice for the same loss.
            hears_loss=False,
            sinks=[name for name, enabled in sinks.items() if enabled],
            # torchtitan counts from 1.
            start_step=step - 1,
        )
        if watch is not None:
            self._losses = _StepLoss(caller_of(Trainer), model, watch)


class _StepLoss:
    """Tells a watch the loss of each step, from what the trainer's micro-batches return."""

    def __init__(self, trainer: Any, model: nn.Module, watch: Watch) -> None:
        mesh = trainer.parallel_dims.get_optional_mesh("loss")
        # Each rank's loss is divided by all ranks' tokens: they add up, where others make a mean.
        self._ranks = 1 if mesh is None else int(mesh.size())
        self._group = loss_group(model, watch)
        leaving = LeavingProblems(watch.problems, [self._group])
        self._guard = Guard(leaving, "loss", "the loss is no longer recorded")
        self._guard.at_end(self._group.close)
        self._watch = watch
        self._parts: list[Tensor] = []
        self._wanted = trainer.gradient_accumulation_steps
        original = trainer.forward_backward_step

        @functools.wraps(original)
        def forward_backward_step(*args: Any, **kwargs: Any) -> Any:
            loss = original(*args, **kwargs)
            self._guard.run(self._micro_batch, loss)
            return loss

        trainer.forward_backward_step = forward_backward_step

    def stop(self) -> None:
        """Give the group back."""
        self._guard.close()

    def _micro_batch(self, loss: Tensor) -> None:
        # A copy: a later replay of a graph writes into the same tensor.
        self._parts.append(local_part(loss.detach()).clone())
        if len(self._parts) < self._wanted:
            return
        mine = torch.stack(self._parts).sum()
        self._parts = []
        self._watch.log(loss=self._group.sum(mine) / self._group.size * self._ranks)


_watches = override(target=MetricsProcessor.Config, description="Gradsight watches the gradients")


@_watches
def watched(config: Any, run_dir: str | None = None, **options: Any) -> Any:
    """What `--override.imports` names; run_dir and options may follow it as JSON."""
    return derive(config, WatchedMetrics.Config, run_dir=run_dir, options=options)
