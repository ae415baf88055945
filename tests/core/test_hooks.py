"""Hooks of ours watch the model they were put on, and no copy of it."""

import copy
import pickle
from typing import Any

import torch
from torch import nn

from gradsight.core.guard import Guard
from gradsight.core.hooks import put_module_hook


def hooked() -> tuple[nn.Module, list[Any]]:
    model = nn.Linear(2, 2)
    told: list[Any] = []
    guard = Guard(None, "test", "a hook failed")
    hook = lambda *given: told.append(given)  # noqa: E731
    put_module_hook(guard, model.register_forward_pre_hook, hook, with_kwargs=True)
    return model, told


def test_the_action_is_given_what_torch_gives() -> None:
    model, told = hooked()
    x = torch.ones(1, 2)
    model(x)
    ((args, kwargs),) = told
    assert args[0] is x
    assert kwargs == {}


def test_a_copy_does_not_tell() -> None:
    model, told = hooked()
    copy.deepcopy(model)(torch.ones(1, 2))
    assert told == []


def test_a_saved_model_does_not_tell_and_takes_nothing_of_ours_along() -> None:
    model, told = hooked()
    pickle.loads(pickle.dumps(model))(torch.ones(1, 2))
    assert told == []
