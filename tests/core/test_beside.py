"""A pass beside training leaves everything as it was found, whatever it does."""

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from gradsight.core.autocast import current_autocast
from gradsight.core.beside import (
    beside_training,
    copied_arguments,
    eager,
    is_compiled,
    replaying,
)
from gradsight.core.calls import RecordedCall, is_suspended
from gradsight.core.random_state import torch_states


class Restless(nn.Module):
    """Changes what it can in every call: buffers, attributes, modes, its own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.frozen = nn.Dropout(0.5).eval()
        self.register_buffer("count", torch.zeros(1))
        self.generator = np.random.default_rng(0)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.generator.random()
        random.random()
        self.frozen.train()
        self.last = x
        self.added = 1
        self.norm.weight.data = self.norm.weight.data + 1
        x.mul_(2)
        return self.norm(x) + torch.rand(1)


def state(model: Restless) -> dict[str, Any]:
    return {
        "tensors": {name: each.clone() for name, each in model.state_dict().items()},
        "memory": [parameter.data_ptr() for parameter in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "attributes": sorted(vars(model)),
        "last": model.last,
        "randomness": [
            torch.get_rng_state().tolist(),
            str(np.random.get_state()),
            random.getstate(),
            str(model.generator.bit_generator.state),
        ],
        "gradients": [parameter.grad for parameter in model.parameters()],
        "around": (is_suspended(), torch.is_grad_enabled(), current_autocast()),
    }


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    tensors = before.pop("tensors"), after.pop("tensors")
    return before == after and all(torch.equal(tensors[0][n], tensors[1][n]) for n in tensors[0])


def recorded(model: Restless, x: Tensor, **changes: Any) -> RecordedCall:
    facts: dict[str, Any] = {
        "args": (x,),
        "kwargs": {},
        "rng": torch_states(),
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "autocast": None,
        "training": True,
        "caller": None,
    }
    return RecordedCall(**facts | changes)


@pytest.mark.parametrize("fails", [False, True])
def test_a_replay_leaves_all_as_found(fails: bool) -> None:
    model = Restless()
    x = torch.randn(4, 2)
    given = x.clone()
    call = recorded(model, x, autocast=("cpu", "bfloat16"))
    model.eval()
    before = state(model)
    with pytest.raises(ValueError) if fails else torch.no_grad(), replaying(model, call):
        args, kwargs = copied_arguments(call)
        assert model(*args, **kwargs).requires_grad
        assert model.training
        if fails:
            raise ValueError
    assert same(before, state(model))
    assert torch.equal(x, given)


def test_a_replay_is_in_the_state_of_the_call() -> None:
    model = Restless()
    call = recorded(model, torch.randn(4, 2), buffers={"count": torch.tensor([5.0])})
    with replaying(model, call):
        first = model(*copied_arguments(call)[0])
        assert model.count.item() == 6
        assert is_suspended()
    torch.rand(7)
    with replaying(model, call):
        assert torch.equal(model(*copied_arguments(call)[0]), first)


def test_hooks_on_parameters_are_silent_in_a_replay() -> None:
    model = nn.Linear(2, 2)
    told: list[Tensor] = []
    model.weight.register_hook(told.append)
    call = recorded(model, torch.randn(4, 2))  # type: ignore[arg-type]
    with replaying(model, call):
        torch.autograd.grad(model(*call.args).sum(), list(model.parameters()))
    assert told == []
    model(*call.args).sum().backward()
    assert len(told) == 1


def test_evaluation_beside_training() -> None:
    model = Restless()
    before = state(model)
    with torch.no_grad(), beside_training(model, evaluating=True):
        assert not any(module.training for module in model.modules())
        assert torch.is_grad_enabled()
        assert is_suspended()
        torch.rand(1)
        np.random.rand()
        random.random()
        model.generator.random()
    assert same(before, state(model))


def test_modes_stay_unless_evaluating() -> None:
    model = Restless()
    with beside_training(model):
        assert [module.training for module in model.modules()] == [True, True, False]


def refuse(graph: Any, inputs: Any) -> Any:
    raise AssertionError("this was to run uncompiled")


def test_compiled_code_runs_eagerly() -> None:
    model = nn.Linear(2, 2)
    assert not is_compiled(nn.Sequential(model))
    compiled = torch.compile(model, backend=refuse)
    assert is_compiled(nn.Sequential(compiled))
    x = torch.ones(1, 2)
    with eager():
        assert torch.equal(compiled(x), model(x))


def test_replays_of_several_threads_leave_torch_as_it_was() -> None:
    wrong: list[object] = []

    def replay() -> None:
        model = nn.Linear(2, 2)
        try:
            for _ in range(5):
                with replaying(model, recorded(model, torch.ones(1, 2))):
                    time.sleep(0.001)  # the others come in, if they can
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=replay) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert "apply" not in vars(CheckpointFunction)


def test_another_thread_checkpoints_as_ever_while_one_replays() -> None:
    calls = 0

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x)

    def train() -> None:
        x = torch.ones(1, 2, requires_grad=True)
        torch.utils.checkpoint.checkpoint(Counting(2, 2), x, use_reentrant=True).sum().backward()

    model = nn.Linear(2, 2)
    with replaying(model, recorded(model, torch.ones(1, 2))):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert calls == 2, "its activations were kept instead of made again"
