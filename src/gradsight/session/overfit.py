"""Can a model learn one batch? Tried on a copy."""

import copy
from typing import Any

import torch
from torch import nn

from gradsight.core.beside import beside_training
from gradsight.core.parameters import unwrapped

_RATES = (1e-3, 1e-2)
"""Both are tried: what one is too small for, the other may learn."""


def overfit_one_batch(
    model: nn.Module, batch: Any, loss_fn: Any, steps: int
) -> tuple[float, float]:
    """The loss of the batch before, and the least that Adam comes to on copies of the model."""
    inner = unwrapped(model)
    first = float("nan")
    best = float("inf")
    for rate in _RATES:
        with beside_training(inner):
            pupil = copy.deepcopy(inner)
            learning = [each for each in pupil.parameters() if each.requires_grad]
            optimizer = torch.optim.Adam(learning, lr=rate)
            for number in range(steps):
                loss = loss_fn(pupil, batch)
                if number == 0:
                    first = float(loss.detach())
                best = min(best, float(loss.detach()))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            best = min(best, float(loss_fn(pupil, batch).detach()))
    return first, best
