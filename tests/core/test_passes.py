"""Which gradients a backward pass wrote, and whose pass it was."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import warm
from gradsight.core import moments, passes
from gradsight.core.calls import is_suspended, suspended
from gradsight.core.guard import Guard
from gradsight.core.passes import BackwardPass


class Follower:
    """Writes down what it is told of its parameters."""

    def __init__(self, *parameters: Tensor) -> None:
        self.told: list[Any] = []
        self.followed = moments.listen(self, Guard(None, "test", "a listener failed"), parameters)

    def gradients_ready(self, begun: BackwardPass, rows: Sequence[int]) -> None:
        self.told.append(list(rows))

    def gradients_missed(self) -> None:
        self.told.append("missed")

    def gradients_shared(self) -> None:
        self.told.append("shared")


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    for listener in list(moments._listeners):
        moments.leave(listener)


def parameter(size: int = 3) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


def in_a_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def hooks_on(tensor: Tensor) -> int:
    return len(tensor._post_accumulate_grad_hooks or {})  # type: ignore[attr-defined]


@pytest.fixture(params=["one thread", "several threads"])
def threads(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def as_seen_by(threads: str) -> None:
    """Before the test, some other thread has run a backward pass too, or none has."""
    if threads == "several threads":
        parameter().sum().backward()  # type: ignore[no-untyped-call]
        in_a_thread(lambda: parameter().sum().backward())  # type: ignore[no-untyped-call]


def test_only_rows_that_were_written_are_told(threads: str) -> None:
    a, b, c = parameter(), parameter(), parameter()
    follower = Follower(a, b, c)
    as_seen_by(threads)
    (a * c).sum().backward()
    b.sum().backward()
    parameter().sum().backward()
    (a * b).sum().backward(inputs=[b])
    assert follower.told == [[0, 2], [1], [1]]


def test_an_edit_between_passes_is_no_pass(threads: str) -> None:
    a, b = parameter(), parameter()
    follower = Follower(a, b)
    as_seen_by(threads)
    (a * b).sum().backward()
    assert a.grad is not None
    a.grad.mul_(0.5)
    b.grad = torch.ones(3)
    parameter().sum().backward()
    torch.autograd.grad((a * b).sum(), [a, b])
    assert follower.told == [[0, 1]]


def test_gradients_that_are_cleared_or_replaced_are_seen_when_written_again(threads: str) -> None:
    a = parameter()
    follower = Follower(a)
    as_seen_by(threads)
    a.sum().backward()
    assert a.grad is not None
    a.grad.zero_()
    a.sum().backward()
    a.grad = None
    a.sum().backward()
    assert follower.told == [[0]] * 3


def test_a_sparse_gradient_is_seen(threads: str) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    follower = Follower(table.weight)
    as_seen_by(threads)
    for _ in range(2):
        table(torch.tensor([1, 3])).sum().backward()
    assert follower.told == [[0], [0]]


def test_parameters_have_hooks_only_while_several_threads_run_passes() -> None:
    a = parameter()
    follower = Follower(a)
    a.sum().backward()
    assert hooks_on(a) == 0
    in_a_thread(lambda: parameter().sum().backward())  # type: ignore[no-untyped-call]
    assert hooks_on(a) == 1
    late = parameter()
    also = Follower(late)
    assert hooks_on(late) == 1
    moments.leave(also)
    assert hooks_on(late) == 0
    moments.leave(follower)
    assert hooks_on(a) == 0


def test_what_thaws_later_is_seen(threads: str) -> None:
    a, b = parameter(), parameter().requires_grad_(False)
    follower = Follower(a, b)
    as_seen_by(threads)
    b.requires_grad_()
    (a * b).sum().backward()
    assert follower.told == [[0, 1]]


def test_a_pass_that_is_waited_for_in_vain_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_PATIENCE", 0.05)
    a = parameter()
    other = parameter()
    follower = Follower(a)
    stranger = Follower(other)

    def meanwhile(gradient: Tensor) -> None:
        in_a_thread(lambda: other.sum().backward())

    y = a * 2
    y.register_hook(meanwhile)  # type: ignore[no-untyped-call]
    y.sum().backward()
    assert follower.told == ["missed"]
    assert stranger.told == [[0], "missed"]
    a.sum().backward()
    assert follower.told == ["missed", [0]]


def test_threads_that_write_the_same_gradients_at_once_are_noticed() -> None:
    a = parameter()
    follower = Follower(a)
    as_seen_by("several threads")

    a.sum().backward()
    others = [lambda: (a * 3).sum().backward()]

    def meanwhile(_: Tensor) -> None:
        while others:
            in_a_thread(others.pop())

    # Called after ours, so the pass that it holds up has written already.
    a.register_post_accumulate_grad_hook(meanwhile)  # type: ignore[no-untyped-call]
    a.sum().backward()
    assert follower.told == [[0], "missed", "shared", "missed", "shared"]


def test_a_pass_that_fails_is_missed_by_those_it_wrote(threads: str) -> None:
    a, b = parameter(), parameter()
    follower = Follower(a)
    stranger = Follower(b)
    as_seen_by(threads)

    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    handle = a.register_post_accumulate_grad_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(KeyboardInterrupt):
        a.sum().backward()
    handle.remove()
    assert not moments.inside_backward()
    assert not moments._passes._under_way
    a.sum().backward()
    assert follower.told == ["missed", [0]]
    assert stranger.told == []


def test_a_fault_of_ours_is_a_pass_missed_and_nothing_more(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    a = parameter()
    follower = Follower(a)
    a.sum().backward()

    def fail(*_: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(passes, "_states", fail)
    for _ in range(3):
        a.sum().backward()
    assert torch.equal(a.grad if a.grad is not None else a, torch.full((3,), 4.0))
    assert follower.told == [[0], "missed", "missed", "missed"]
    assert capfd.readouterr().err.count("planted") == 1


def test_a_pass_of_ours_is_one_threads_own_affair() -> None:
    seen: list[bool] = []
    with suspended():
        in_a_thread(lambda: seen.append(is_suspended()))
        seen.append(is_suspended())
    seen.append(is_suspended())
    assert seen == [False, True, False]


def test_who_listens_to_a_thread_hears_of_no_other() -> None:
    class Listener:
        passes = 0

        def before_backward(self, begun: BackwardPass) -> None:
            self.passes += 1

    listener = Listener()
    moments.listen(listener, Guard(None, "test", "a listener failed"), own_thread=True)
    in_a_thread(lambda: parameter().sum().backward())  # type: ignore[no-untyped-call]
    parameter().sum().backward()
    assert listener.passes == 1


NESTED = """
import os, threading, torch
from gradsight.core import moments
from gradsight.core.calls import is_suspended, suspended
from gradsight.core.guard import Guard

class Listener:
    told = 0
    def gradients_ready(self, begun, rows):
        self.told += 1
        self.rows = list(rows)

here = threading.get_ident()
inside = []
deepest = torch.nn.Parameter(torch.ones(2))
listener = Listener()
moments.listen(listener, Guard(None, "test", "a listener failed"), [deepest])

def nest(levels):
    x = torch.ones(2, requires_grad=True)
    y = x * deepest if levels == 0 else x * 2
    def deeper(gradient):
        elsewhere = threading.get_ident() != here
        inside.append((elsewhere, moments.inside_backward(), is_suspended()))
        if levels:
            with torch.enable_grad():
                nest(levels - 1)
    y.register_hook(deeper)
    y.sum().backward()

nest(70)
assert any(elsewhere for elsewhere, _, _ in inside), "the engine used no thread of its own"
assert all(within for _, within, _ in inside), "a hook did not know its pass"
assert (listener.told, listener.rows) == (1, [0]), "a pass inside another was taken for one"
inside.clear()
with suspended():
    nest(70)
assert any(elsewhere for elsewhere, _, _ in inside)
assert all(ours for _, _, ours in inside), "a hook did not know that the pass was ours"
# Torch itself may abort at exit once its engine has made such threads.
os._exit(0)
"""


def test_threads_of_the_engine_know_the_thread_that_called() -> None:
    """On accelerators all hooks run in such threads; on a CPU those of passes nested deeply do."""
    done = warm.run(["-c", NESTED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
