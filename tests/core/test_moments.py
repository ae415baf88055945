"""Torch's moments: told in order, to those who have a method for them, and all put back."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gradsight.core import moments
from gradsight.core.calls import suspended
from gradsight.core.guard import Guard


def listen(listener: object) -> None:
    moments.listen(listener, Guard(None, "test", "a listener failed"))


class Everything:
    """Listens to every moment."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name not in moments.MOMENTS:
            raise AttributeError(name)
        method = Told(self, name)
        setattr(self, name, method)
        return method


class Told:
    """A bound method of a listener that writes down its own name."""

    def __init__(self, listener: Everything, name: str) -> None:
        self.__self__ = listener
        self._name = name

    def __call__(self, *args: object) -> None:
        self.__self__.told.append(self._name)


class OnlyAfter:
    """Listens to one moment alone."""

    def __init__(self) -> None:
        self.passes = 0

    def after_backward(self, begun: object, rows: object) -> None:
        self.passes += 1


class Opens:
    """Brings another listener in when a backward pass begins."""

    def __init__(self) -> None:
        self.other = Everything()

    def before_backward(self, begun: object) -> None:
        listen(self.other)


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    """Whatever a test does, torch is as it was."""
    backward = torch.autograd.backward
    scale = torch.amp.GradScaler.scale
    yield
    for listener in list(moments._listeners):
        moments.leave(listener)
    assert torch.autograd.backward is backward
    assert torch.amp.GradScaler.scale is scale


def backward() -> None:
    with torch.enable_grad():  # hooks run without
        torch.ones(2, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]


def test_a_backward_pass_is_told_in_order() -> None:
    listener = Everything()
    listen(listener)
    backward()
    assert listener.told == ["before_backward", "after_backward", "gradients_ready"]


def test_everybody_has_noted_a_pass_before_anybody_looks() -> None:
    order: list[str] = []
    first = Everything()
    second = Everything()
    first.told = order
    second.told = order
    listen(first)
    listen(second)
    backward()
    assert order[2:] == ["after_backward", "after_backward", "gradients_ready", "gradients_ready"]


def test_a_listener_is_told_only_what_it_has_a_method_for() -> None:
    listener = OnlyAfter()
    listen(listener)
    backward()
    backward()
    assert listener.passes == 2


def test_an_object_without_any_such_method_is_refused() -> None:
    with pytest.raises(
        TypeError, match="object has none of the methods before_backward, gradients"
    ):
        listen(object())


def test_a_pass_inside_another_is_part_of_it() -> None:
    listener = Everything()
    listen(listener)
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: backward())  # type: ignore[no-untyped-call]
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert listener.told == ["before_backward", "after_backward", "gradients_ready"]


def test_one_who_comes_at_the_beginning_of_a_pass_hears_of_it() -> None:
    opens = Opens()
    listen(opens)
    backward()
    assert opens.other.told == ["before_backward", "after_backward", "gradients_ready"]


def test_passes_of_our_own_are_not_told() -> None:
    listener = Everything()
    listen(listener)
    with suspended():
        backward()
    assert listener.told == []


@pytest.mark.parametrize("overflows", [False, True])
def test_a_scaler_is_told_whether_or_not_it_steps(overflows: bool) -> None:
    listener = Everything()
    listen(listener)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100 if overflows else 2.0)
    scaler.scale(model(torch.full((3, 2), 1e20 if overflows else 1.0)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert listener.told == [
        "loss_scaled",
        "before_backward",
        "after_backward",
        "gradients_ready",
        "edit_begins",
        "edit_ended",
        "gradients_unscaled",
        "scaler_steps",
        "scaler_stepped",
    ]


def test_who_has_left_is_told_no_more_and_others_are() -> None:
    gone = Everything()
    stays = Everything()
    listen(gone)
    listen(stays)
    moments.leave(gone)
    moments.leave(gone)
    backward()
    assert gone.told == []
    assert len(stays.told) == 3


def test_one_who_leaves_while_the_first_comes_takes_nothing_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The garbage collector may end an old listener at any moment, also inside of `listen`."""
    original = torch.autograd.backward
    install = moments._install

    def install_while_another_leaves() -> None:
        install()
        moments.leave(object())

    monkeypatch.setattr(moments, "_install", install_while_another_leaves)
    listener, guard = OnlyAfter(), Guard(None, "test", "a listener failed")
    moments.listen(listener, guard)
    backward()
    assert listener.passes == 1
    guard.close()
    assert torch.autograd.backward is original
