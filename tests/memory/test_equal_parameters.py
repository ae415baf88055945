"""Optimizer steps of predictions, which leave out equal parameters: the peak is the measured one."""

from typing import Any

import pytest
import torch
from torch import nn

from gradsight import measure_peak_memory, predict_peak_memory
from memory.measured_step import OPTIMIZERS, step_of


def build() -> tuple[Any, ...]:
    """The last layer equals the first, but what the optimizer made for a small one is beside it."""
    middle = [nn.Linear(64, 64) for _ in range(6)]
    layers = [nn.Linear(64, 1024, bias=False), nn.Linear(1024, 64), *middle, nn.LayerNorm(64)]
    model = nn.Sequential(*layers, nn.Linear(64, 1024, bias=False))
    return model, torch.randn(2, 64), lambda model, batch: model(batch).square().mean()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_peak_is_that_of_the_whole_step(name: str) -> None:
    use = measure_peak_memory(step_of(build(), optimizer=name))
    predicted = predict_peak_memory(build, optimizer=name)
    assert (predicted.peak_bytes, predicted.by_kind) == (use.peak_bytes, use.by_kind)
