"""Parameters go by the model's own names, whatever is wrapped around it."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gradsight.core.parameters import clean_name, named_parameters


class Net(nn.Module):
    """Has a child that is called `module` by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


PLAIN = [name for name, _ in Net().named_parameters()]


def names(model: nn.Module) -> list[str]:
    return [named.name for named in named_parameters(model)]


def test_wrappers_leave_no_trace() -> None:
    assert names(Net()) == PLAIN
    assert names(torch.compile(Net())) == PLAIN
    assert names(nn.DataParallel(Net())) == PLAIN
    model = Net()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1])
    assert [clean_name(model, name) for name, _ in model.named_parameters()] == PLAIN
    wrapped = torch.compile(nn.DataParallel(model))
    assert names(wrapped) == PLAIN
    assert [clean_name(wrapped, name) for name, _ in wrapped.named_parameters()] == PLAIN


def test_tied_weights_keep_all_their_names() -> None:
    model = Net()
    model.blocks[1].weight = model.blocks[0].weight
    (tied,) = [named for named in named_parameters(model) if len(named.names) > 1]
    assert tied.names == ("blocks.0.weight", "blocks.1.weight")
    assert tied.describe().aliases == ("blocks.1.weight",)


def test_a_module_used_twice_shows_both_names() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    assert [named.names for named in named_parameters(model)] == [
        ("0.weight", "2.weight"),
        ("0.bias", "2.bias"),
    ]
