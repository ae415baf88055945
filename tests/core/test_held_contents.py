"""Iterators that an extra pass would advance."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsight.core.held_contents import advanced_by

pytestmark = pytest.mark.internal

NUMBERS = itertools.count()


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + next(NUMBERS)


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return x + next(NUMBERS)


class Static(nn.Module):
    @staticmethod
    def number() -> int:
        return next(NUMBERS)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.number()


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + sum(next(NUMBERS) for _ in range(2))


class Thing:
    """What a proxy stands for."""


class Proxied(nn.Module):
    def __init__(self, thing: Thing) -> None:
        super().__init__()
        self.thing = weakref.proxy(thing)


@pytest.mark.parametrize("made", [Plain, Decorated, Static, Nested])
def test_an_iterator_is_noticed(made: Callable[[], nn.Module]) -> None:
    assert advanced_by(made()) is not None


def test_a_proxy_is_no_iterator() -> None:
    thing: Any = Thing()
    model = Proxied(thing)
    assert advanced_by(model) is None
    del thing
    assert advanced_by(model) is None
