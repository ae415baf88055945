"""Which optimizers are watched together."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import lr_scheduler

from gradsight.attach import session
from gradsight.attach.models import has_scheduler
from gradsight.attach.session import _sharing_models


def test_no_optimizer_is_lost_where_one_shares_models_with_two_groups() -> None:
    one = nn.Linear(2, 2)
    other = nn.Linear(2, 2)
    optimizers = [
        torch.optim.SGD(one.parameters(), lr=0.1),
        torch.optim.SGD(other.parameters(), lr=0.1),
        torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1),
    ]
    (group,) = _sharing_models(optimizers)
    assert {id(each) for each in group.optimizers} == {id(each) for each in optimizers}
    assert {id(each) for each in group.models} == {id(one), id(other)}


def test_optimizers_of_different_models_are_kept_apart() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    groups = _sharing_models(optimizers)
    assert [group.optimizers for group in groups] == [[each] for each in optimizers]
    assert session._sessions == []


def test_schedulers_are_seen_whatever_they_were_made_for() -> None:
    optimizers = [torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1) for _ in range(4)]
    plain, wrapped, plateau, _ = optimizers
    kept = [
        lr_scheduler.LambdaLR(plain, lambda step: 0.9**step),
        lr_scheduler.LambdaLR(Accelerator(cpu=True).prepare(wrapped), lambda step: 0.9**step),
        lr_scheduler.ReduceLROnPlateau(plateau),
    ]
    assert [has_scheduler(each) for each in optimizers] == [True, True, True, False]
    del kept
