"""Hooks of ours watch the model they were put on, and no copy of it."""

import copy
import io
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


def test_a_saved_model_holds_no_hooks_of_gradsight() -> None:
    model, _ = hooked()
    file = io.BytesIO()
    torch.save(model, file)
    assert b"gradsight" not in file.getvalue()


def test_a_saved_model_can_be_loaded_with_weights_only() -> None:
    model, _ = hooked()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.Linear]):
        loaded = torch.load(file, weights_only=True)
    assert not loaded._forward_pre_hooks_with_kwargs  # a later hook may get the same number
    assert "__getstate__" not in vars(loaded)


def test_the_users_own_hooks_are_copied() -> None:
    model, told = hooked()
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(args))
    copy.deepcopy(model)(torch.ones(1, 2))
    assert len(seen) == 1
    assert not told


def test_a_layer_with_a_state_of_its_own_keeps_it() -> None:
    model = nn.LSTM(2, 2)
    guard = Guard(None, "test", "a hook failed")
    put_module_hook(guard, model.register_forward_pre_hook, lambda *given: None)
    copied = copy.deepcopy(model)
    x = torch.ones(1, 2)
    torch.testing.assert_close(copied(x)[0], model(x)[0])


def test_nothing_is_left_on_the_model_when_the_guard_is_closed() -> None:
    model = nn.Linear(2, 2)
    before = dict(vars(model))
    guard = Guard(None, "test", "a hook failed")
    put_module_hook(guard, model.register_forward_pre_hook, lambda *given: None)
    put_module_hook(guard, model.register_forward_hook, lambda *given: None)
    guard.close()
    assert vars(model) == before
