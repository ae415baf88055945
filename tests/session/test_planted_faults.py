"""No internal fault reaches training: it goes on bit for bit, and the fault is reported."""

from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest
import torch

from session import planted_faults as faults
from session.planted_faults import LOOPS, Called, Fault, plant, targets

PARTS = 9


@pytest.fixture(scope="module")
def planned() -> list[Fault]:
    return faults.one_loop_each()


@pytest.mark.parametrize("part", range(PARTS))
def test_no_fault_below_an_entry_point_reaches_the_loop(part: int, planned: list[Fault]) -> None:
    assert [wrong for fault in planned[part::PARTS] if (wrong := plant(fault))] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("loop", LOOPS)
def test_no_fault_reaches_any_of_the_loops(loop: str, part: int) -> None:
    assert [wrong for fault in faults.all_loops(loop)[part::PARTS] if (wrong := plant(fault))] == []


def test_every_kind_of_caller_is_traced(planned: list[Fault]) -> None:
    """Without this, a trace that sees nothing would let everything pass."""
    origins = {fault.target.origin for fault in planned}
    for part in (
        "torch/optim/optimizer.py",  # hooks of optimizers
        "torch/optim/lbfgs.py",  # the closure that is evaluated again
        "torch/_tensor.py (backward)",
        "torch/autograd/graph.py",  # hooks of tensors
        "torch/nn/modules/module.py",  # hooks of modules
        "torch/autograd/function.py",  # backward passes of functions
        "function mode",
        "loop (by_two_passes)",  # with engine.observe()
        "GhostEngine.loss",
        "background thread",
        "sink",
    ):
        assert any(origin.startswith(part) for origin in origins), part
    # `with` needs nothing of Gradsight to begin, and `with engine.observe()` is seen in the loop.
    entered = {each for each in Called.methods if each.endswith(("__enter__", ".observe"))}
    assert "Watch.log" in Called.methods
    assert Called.methods - entered - origins == set()


# The harness itself: a hook that looks like one of Gradsight's, without its guard.

HOOK = """
def observed():
    pass

def hook(*_):
    try:
        observed()
    except Exception as error:
        handle(error)
"""


@pytest.fixture
def planted_in_hook(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """Plant in a loop with a hook that handles errors as given; return what the harness says."""

    def planted(handle: Callable[[Exception], None], way: str = "once") -> str | None:
        names: dict[str, Any] = {"handle": handle}
        exec(compile(HOOK, f"{faults.PACKAGE}of_a_test.py", "exec"), names)

        def loop(subject: faults.Subject, watched: Any) -> None:
            put = subject.optimizer.register_step_post_hook(names["hook"])
            try:
                faults.by_optimizer(subject, watched)
            finally:
                put.remove()

        name = f"with a hook, {id(names)}"  # what is known of a loop is kept by its name
        monkeypatch.setitem(LOOPS, name, faults.Watched(loop, faults.sgd))
        hook: CodeType = names["hook"].__code__
        (target,) = (each for each in targets(name) if each.entry is hook)
        assert target.code is names["observed"].__code__
        return plant(Fault(name, target, 3, way))

    return planted


def reraise(error: Exception) -> None:
    raise error


def swallow(error: Exception) -> None:
    """Report nothing."""


def draw_a_random_number(error: Exception) -> None:
    print(error, file=faults.sys.stderr)
    torch.rand(1)


@pytest.mark.parametrize(
    ("handle", "wrong"),
    [
        (reraise, f"raised Planted: {faults.MESSAGE}"),
        (swallow, "was not reported"),
        (draw_a_random_number, "left changed: weights, gradients, random numbers"),
    ],
)
def test_a_fault_that_gets_through_is_noticed(
    handle: Any, wrong: str, planted_in_hook: Callable[..., str | None]
) -> None:
    assert str(planted_in_hook(handle)).endswith(f": {wrong}")


@pytest.mark.parametrize(("way", "times"), [("once", 1), ("for good", faults.STEPS - 2)])
def test_a_fault_is_raised_once_or_from_then_on(
    way: str, times: int, planted_in_hook: Callable[..., str | None]
) -> None:
    raised: list[Exception] = []
    planted_in_hook(raised.append, way)
    assert len(raised) == times
