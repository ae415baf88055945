"""Stand-ins of torchtitan 0.3.0 and OLMo-core 3.0.0: what their integrations touch, in the same shape.

The real ones want other versions of packages than the tests have: examples/other_trainers/run.sh
trains with them.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

EXAMPLE = Path(__file__).parents[2] / "examples" / "other_trainers"


def put(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """A module of this name, and the packages above it."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        above = ".".join(parts[:length])
        if above not in sys.modules:
            monkeypatch.setitem(sys.modules, above, ModuleType(above))
    for each, value in contents.items():
        setattr(sys.modules[name], each, value)


# torchtitan


class MetricsProcessor:
    @dataclass(kw_only=True, slots=True)
    class Config:
        log_freq: int = 10
        enable_tensorboard: bool = False
        enable_wandb: bool = False

    def __init__(self, config: Any, *, parallel_dims: Any, dump_folder: str, **_: Any) -> None:
        self.config = config
        self.parallel_dims = parallel_dims
        self.optimizers: Any = None
        self.model_parts: Any = None
        self.closed = False

    def should_log(self, step: int) -> bool:
        return step == 1 or step % self.config.log_freq == 0

    def close(self) -> None:
        self.closed = True


OVERRIDES: dict[str, Any] = {}


def override(*, target: type, description: str = "") -> Callable[[Any], Any]:
    def registered(function: Any) -> Any:
        OVERRIDES[f"{function.__module__}.{function.__name__}"] = (target, function)
        return function

    return registered


def derive(source: Any, target: Any, **deltas: Any) -> Any:
    copied = {each.name: getattr(source, each.name) for each in fields(source)}
    return target(**copied | deltas)


class OptimizersContainer(torch.optim.Optimizer):
    """An optimizer of all parameters, with those that really step inside."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        super().__init__(parameters, {"lr": 0.1})
        self.optimizers = [torch.optim.SGD(parameters, lr=0.1)]

    def step(self) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


class TitanTrainer:
    """Micro-batches whose losses add up; their chunks are pulled back one by one."""

    gradient_accumulation_steps = 2

    def __init__(self, model: nn.Module, processor_config: Any, folder: str) -> None:
        self.model = model
        self.parallel_dims = SimpleNamespace(get_optional_mesh=lambda name: None)
        made = sys.modules["gradsight_torchtitan"].WatchedMetrics
        self.metrics_processor = made(
            processor_config, parallel_dims=self.parallel_dims, dump_folder=folder
        )
        self.optimizers = OptimizersContainer(model)
        self.metrics_processor.optimizers = self.optimizers
        self.metrics_processor.model_parts = [model]
        self.step = 0

    def forward_backward_step(self, *, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        hidden = self.model[0](x)
        leaf = hidden.detach().requires_grad_()
        total = torch.zeros(())
        for part in range(2):
            rows = slice(part * len(x) // 2, (part + 1) * len(x) // 2)
            loss = (self.model[1](leaf[rows]) - y[rows]).square().sum() / (2 * len(x))
            loss.backward()
            total = total + loss.detach()
        # As torchtitan's: the root of the second pass has the whole loss's value once more.
        once_more = (hidden * leaf.grad).sum()
        (once_more - once_more.detach() + total).backward()
        return total

    def train_step(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        self.step += 1
        self.optimizers.zero_grad()
        self.metrics_processor.should_log(self.step)
        losses = [self.forward_backward_step(batch=batch) for batch in batches]
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizers.step()
        return float(sum(losses))

    def close(self) -> None:
        self.metrics_processor.close()


def put_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gradsight_torchtitan", raising=False)
    monkeypatch.syspath_prepend(EXAMPLE)
    put(monkeypatch, "torchtitan.components.metrics", MetricsProcessor=MetricsProcessor)
    put(monkeypatch, "torchtitan.config.override", override=override, derive=derive)
    put(monkeypatch, "torchtitan.trainer", Trainer=TitanTrainer)


# OLMo-core


@dataclass
class Callback:
    priority: ClassVar[int] = 0
    _trainer = None

    @property
    def trainer(self) -> Any:
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = trainer


class OlmoTrainer:
    def __init__(self, model: nn.Module, folder: str, callback: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.train_module = SimpleNamespace(model=model, optim=optimizer)
        self.save_folder = folder
        self.global_step = 0
        self.canceled: str | None = None
        self._callback = callback
        callback.trainer = self

    def cancel_run(self, reason: str) -> None:
        self.canceled = reason

    def fit(
        self, batches: list[list[tuple[Tensor, Tensor]]], skipped: tuple[int, ...] = ()
    ) -> None:
        # A dry run, as OLMo-core makes one: its gradients are thrown away.
        self._train(batches[0])
        self.train_module.optim.zero_grad()
        try:
            for step in batches:
                self.global_step += 1
                self._callback.pre_step({})
                if self.global_step not in skipped:
                    self._train(step)
                    nn.utils.clip_grad_norm_(self.train_module.model.parameters(), 0.1)
                    self.train_module.optim.step()
                    self.train_module.optim.zero_grad()
                self._callback.post_step()
                if self.canceled is not None:
                    break
        except BaseException as error:
            self._callback.on_error(error)
            raise
        finally:
            self._callback.close()

    def _train(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        for x, y in batches:
            ((self.train_module.model(x) - y).square().mean() / len(batches)).backward()


def put_olmo_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gradsight_olmo_core", raising=False)
    monkeypatch.syspath_prepend(EXAMPLE)
    put(monkeypatch, "olmo_core.train.callbacks", Callback=Callback)
