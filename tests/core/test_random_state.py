"""Every generator is put back: torch's, numpy's, Python's, and those that modules hold."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradsight.core.random_state import (
    as_bytes,
    drawing_again,
    random_sources,
    randomness_kept,
    set_source_state,
    set_torch_states,
    source_state,
    torch_states,
)


class Drawing(nn.Module):
    """Holds a generator of every kind, one of them in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.torchs = torch.Generator().manual_seed(1)
        self.part = nn.Linear(1, 1)
        self.part.numpys = np.random.default_rng(2)
        self.older = np.random.RandomState(3)
        self.pythons = random.Random(4)


DRAWS: dict[str, Any] = {
    "torch": lambda model: torch.rand(3).tolist(),
    "numpy": lambda model: np.random.rand(3).tolist(),
    "python": lambda model: random.random(),
    "a module's of torch": lambda model: torch.rand(3, generator=model.torchs).tolist(),
    "a part's of numpy": lambda model: model.part.numpys.random(3).tolist(),
    "a module's of numpy, the older kind": lambda model: model.older.rand(3).tolist(),
    "a module's of Python": lambda model: model.pythons.random(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_inside_is_drawn_again_after(name: str) -> None:
    model = Drawing()
    draw = DRAWS[name]
    with pytest.raises(ValueError), randomness_kept(model.modules()):
        inside = draw(model)
        raise ValueError
    assert draw(model) == inside
    assert draw(model) != inside


def test_the_sources_that_modules_hold_have_names() -> None:
    assert set(random_sources(Drawing())) == {"torchs", "part.numpys", "older", "pythons"}


@pytest.mark.parametrize("name", ["torchs", "part.numpys", "older", "pythons"])
def test_a_state_is_put_back(name: str) -> None:
    source = random_sources(Drawing())[name]
    state = source_state(source)
    before = as_bytes(state)
    draw = {"torchs": lambda: torch.rand(1, generator=source), "pythons": lambda: source.random()}
    draw.get(name, lambda: source.normal())()
    assert as_bytes(source_state(source)) != before
    set_source_state(source, state)
    assert as_bytes(source_state(source)) == before


def test_drawing_again_leaves_the_generators_where_they_are() -> None:
    states = torch_states()
    first = torch.rand(2)
    after = torch_states()
    with drawing_again(states):
        assert torch.equal(torch.rand(2), first)
    assert torch.equal(torch_states()["cpu"], after["cpu"])
    with drawing_again(None):
        torch.rand(2)
    assert not torch.equal(torch_states()["cpu"], after["cpu"])


def test_states_of_devices_that_are_not_here_are_left_out() -> None:
    if not torch.cuda.is_available():
        set_torch_states({"cuda:7": torch.get_rng_state()})
    assert next(iter(torch_states([]))) == "cpu"
