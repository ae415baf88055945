"""Parameters that two optimizers update, noticed by the optimizers' steps."""

import pytest
import torch
from torch import nn

from gradsight.session.signals import RepeatedUpdates

pytestmark = pytest.mark.internal


def test_optimizers_that_are_gone_do_not_count() -> None:
    """A new optimizer may have the id of one that is gone."""
    parameter = nn.Parameter(torch.ones(2))
    updates = RepeatedUpdates([parameter])
    trained = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    updates.stepped(trained)
    parameter.grad = None
    for _ in range(60):
        updates.since_pass.clear()
        updates.stepped(torch.optim.SGD([parameter], lr=0.1))
    assert updates.take() == ((), ())
    idle = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(10):
        updates.since_pass.clear()
        updates.stepped(idle)
    assert updates.take() == ((), (0,))
