"""What cannot be meant is refused in words of ours: what was expected, what came, what to do.

A new case is one line of a table.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradsight import (
    GradsightError,
    MemoryMonitor,
    apply_checkpointing,
    measure_peak_memory,
    plan_checkpointing,
    predict_peak_memory,
    verify_checkpointing,
)

Step = tuple[Any, ...]
CheckpointingPlan = inspect.signature(plan_checkpointing).return_annotation


class Net(nn.Module):
    """Two repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def build(loss: Any = loss_fn, batch: Any = None, model: nn.Module | None = None) -> Step:
    if batch is None:
        batch = (torch.ones(2, 4), torch.ones(2, 4))
    return model or Net(), batch, loss


PLAN = CheckpointingPlan("full:0", ("blocks.0", "blocks.1"), 1, 0.0, 1, 1)


def frozen() -> Step:
    model = Net()
    model.requires_grad_(False)
    return build(model=model)


def checkpointed() -> Step:
    model = Net()
    apply_checkpointing(model)
    return build(model=model)


def without_gradient(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return loss_fn(model, batch)


def with_its_own_backward(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = loss_fn(model, batch)
    loss.backward()
    return loss


def of_another_model(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.Linear(1, 1)(torch.ones(1)).sum()


def batches() -> Iterator[torch.Tensor]:
    yield torch.ones(2, 4)


async def coroutine() -> None:
    pass


def loader() -> Any:
    return torch.utils.data.DataLoader([torch.ones(4)])


BUILDS: list[tuple[Any, str]] = [
    (Net, r"must return \(model, batch\) or \(model, batch, loss_fn\), got Net"),
    (Net(), r"build\(\) raised TypeError: .*missing 1 required"),
    (lambda x: build(), r"build\(\) raised TypeError: .*missing 1 required"),
    (build(), "build must be a function without arguments, got tuple"),
    ("train.py:build", "build must be a function without arguments, got str"),
    (None, "build must be a function without arguments, got NoneType"),
    (lambda: None, "got NoneType"),
    (lambda: list(build()), "got list"),
    (lambda: {"model": Net()}, "got dict"),
    (lambda: (*build(), 3), "got a tuple of 4"),
    (lambda: (Net, *build()[1:]), "must be a torch.nn.Module, got the class Net"),
    (lambda: (build()[1], *build()[::2]), "must be a torch.nn.Module, got tuple"),
    (lambda: (Net(), 3), "without loss_fn the batch is a dict or tuple of arguments, got int"),
    (lambda: build(batch=batches()), r"got generator, which gives another .*next\(iter\(loader"),
    (lambda: (Net(), iter([1])), "the same batch, got list_iterator"),
    (lambda: build(batch=loader()), "the same batch, got DataLoader, which gives another"),
    (lambda: build(batch=()), "the step's loss raised IndexError: .*Try the step by itself first"),
    (lambda: build(batch=torch.ones(2, 3)), "the step's loss raised RuntimeError"),
    (lambda: build(None), "loss_fn must be a function .* got NoneType"),
    (lambda: build(nn.MSELoss()), "got MSELoss, which takes predictions and labels. Write"),
    (lambda: build(lambda batch: 1), "cannot be called so: too many positional arguments"),
    (lambda: build(lambda m, b: 0.5), "must be a tensor with one element, got float"),
    (lambda: build(lambda m, b: m(b[0])), r"one element, got a tensor of shape \(2, 4\)"),
    (lambda: build(lambda m, b: torch.tensor(3)), "the loss has no gradient: nothing that"),
    (lambda: build(lambda m, b: loss_fn(m, b).cfloat()), "must be a real number, got .*complex64"),
    (lambda: build(without_gradient), r"the loss has no gradient: .*without torch.no_grad\(\)"),
    (lambda: build(with_its_own_backward), "the backward pass raised RuntimeError: .*second time"),
    (lambda: build(of_another_model), "gave no parameter of the model a gradient"),
    (frozen, "no trainable parameters|no repeated blocks"),
]

OPTIMIZERS: list[tuple[Any, str]] = [
    ("AdamW", "unknown optimizer 'AdamW'; known are adamw, adam, sgd"),
    ("", "unknown optimizer ''; known are"),
    (0, "optimizer must be a name, got int; known are adamw"),
    (["adamw"], "optimizer must be a name, got list"),
    ({}, "optimizer must be a name, got dict"),
    (torch.optim.AdamW, "optimizer must be a name, got the class AdamW"),
    (torch.optim.SGD([torch.ones(1)]), "optimizer must be a name, got SGD"),
]

POLICIES: list[tuple[Any, str]] = [
    ("Full", "'Full' is not a policy; known are 'full', 'selective'"),
    ("", "'' is not a policy"),
    (True, "a policy is text or a CheckpointingPlan, got bool"),
    (["full"], "a policy is text or a CheckpointingPlan, got list; known are"),
    (b"full", "a policy is text or a CheckpointingPlan, got bytes"),
    (CheckpointingPlan, "a policy is text or a CheckpointingPlan, got type"),
    ("first:-1", "'first:-1' is not a policy"),
    ("first:9", "names block 8, but the model has 2 blocks"),
    ("first:\N{ARABIC-INDIC DIGIT ONE}", "is not a policy"),
    ("full:1-0", "a range that ends before it starts"),
    ("full:0,full:0", "names block 0 twice"),
    ("selective@-1", "'-1' is not a number of operations per byte"),
    ("selective@1e999", "'1e999' is not a number of operations per byte"),
    (replace(PLAN, blocks=("a", "b")), "the model has no module 'a'"),
]

BLOCKS: list[tuple[Any, str]] = [
    ("blocks.0", "must be a list of module names, as in .*got 'blocks.0'"),
    ([], r"must be a list of module names.*got \[\]"),
    (3, "must be a list of module names.*got 3"),
    (True, "must be a list of module names.*got True"),
    ({"blocks.0"}, "must be a list of module names.*got {'blocks.0'}"),
    ((name for name in ["blocks.0"]), "must be a list of module names.*got <generator"),
    ([0, 1], "must be a list of module names.*got int among them"),
    ([Net().blocks[0]], "must be a list of module names.*got Sequential among them"),
    (Net().blocks, "must be a list of module names.*got ModuleList"),
    (["block.0"], "has no module 'block.0'; nearest: blocks.0"),
    (["zzz"], "has no module 'zzz'; it has embed, blocks, blocks.0"),
    ([""], "has no module ''; it has embed"),
    (["blocks"], "'blocks' is a ModuleList, which is never called itself: .*blocks.0, blocks.1"),
    (["embed", "embed"], "names 'embed' twice"),
    (["blocks.0", "blocks.0.0"], "must not lie in one another"),
]

BUDGETS: list[tuple[Any, str]] = [
    (0, "must be above zero, got 0"),
    (-1, "must be above zero, got -1"),
    (float("nan"), "nan is not a size of memory: write for example '6GB'"),
    (float("inf"), "inf is not a size of memory"),
    (True, "text such as '6GB' or a number of bytes, got bool"),
    (None, "text such as '6GB' or a number of bytes, got NoneType"),
    ("6G", "'6G' is not a size of memory: write for example '6GB'"),
    ("6,5GB", "'6,5GB' is not a size of memory"),
    ("", "'' is not a size of memory"),
    ("0.5B", "must be above zero, got '0.5B'"),
]

DEVICES: list[Any] = ["cdua", "CPU", "cuda:0", "", None, 0, torch.device("cpu")]


def refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(GradsightError, match=message):
        call()


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "message"), BUILDS)
def test_builds(wrong: Any, message: str) -> None:
    refused(lambda: predict_peak_memory(wrong), message)
    refused(lambda: plan_checkpointing(wrong, "1GB", blocks=["embed"]), message)
    refused(lambda: verify_checkpointing(wrong, blocks=["embed"]), message)


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "message"), OPTIMIZERS)
def test_optimizers(wrong: Any, message: str) -> None:
    refused(lambda: predict_peak_memory(build, optimizer=wrong), message)
    refused(lambda: plan_checkpointing(build, "1GB", optimizer=wrong), message)
    refused(lambda: verify_checkpointing(build, optimizer=wrong, blocks=["embed"]), message)


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "message"), POLICIES)
def test_policies(wrong: Any, message: str) -> None:
    refused(lambda: apply_checkpointing(Net(), wrong), message)
    refused(lambda: predict_peak_memory(build, policy=wrong), message)
    refused(lambda: verify_checkpointing(build, policy=wrong), message)


def test_no_policy() -> None:
    """A prediction of the plain step is what None asks for; checkpointing by nothing is not."""
    message = "a policy is text or a CheckpointingPlan, got NoneType; known are .*'none'"
    refused(lambda: apply_checkpointing(Net(), None), message)  # type: ignore[arg-type]
    refused(lambda: verify_checkpointing(build, policy=None), message)  # type: ignore[arg-type]


@pytest.mark.parametrize(("wrong", "message"), BLOCKS)
def test_blocks(wrong: Any, message: str) -> None:
    refused(lambda: apply_checkpointing(Net(), blocks=wrong), message)
    refused(lambda: predict_peak_memory(build, policy="full", blocks=wrong), message)
    refused(lambda: plan_checkpointing(build, "1GB", blocks=wrong), message)
    refused(lambda: verify_checkpointing(build, blocks=wrong), message)


def test_blocks_of_nothing() -> None:
    message = "policy=None recomputes nothing: give for example policy='full', or leave blocks out"
    refused(lambda: predict_peak_memory(build, blocks=["blocks.0"]), message)


@pytest.mark.parametrize("other", [["blocks.1", "blocks.0"], ["blocks.0"]])
def test_a_plan_has_its_own_blocks(other: list[str]) -> None:
    message = r"the plan was made for the blocks blocks.0, blocks.1, ... \(2 in all\)"
    refused(lambda: apply_checkpointing(Net(), PLAN, blocks=other), message)
    refused(lambda: verify_checkpointing(build, policy=PLAN, blocks=other), message)
    assert apply_checkpointing(Net(), PLAN, blocks=list(PLAN.blocks)).modes == {"blocks.0": "full"}


@pytest.mark.parametrize(("wrong", "message"), BUDGETS)
def test_budgets(wrong: Any, message: str) -> None:
    refused(lambda: plan_checkpointing(build, wrong), message)


@pytest.mark.parametrize("wrong", DEVICES)
def test_devices(wrong: Any) -> None:
    message = "device must be one of cpu, cuda, got"
    refused(lambda: predict_peak_memory(build, device=wrong), message)
    refused(lambda: plan_checkpointing(build, "1GB", device=wrong), message)


def test_models() -> None:
    refused(lambda: apply_checkpointing(Net), "must be a torch.nn.Module, got the class Net")  # type: ignore[arg-type]
    refused(lambda: apply_checkpointing([Net()]), "must be a torch.nn.Module, got list")  # type: ignore[arg-type]
    refused(lambda: apply_checkpointing(nn.ReLU()), "no repeated blocks found in ReLU")
    refused(lambda: plan_checkpointing(checkpointed, "1GB"), "checkpointing is applied already")
    refused(lambda: verify_checkpointing(checkpointed), "checkpointing is applied already")
    on_meta = Net().to("meta")
    refused(lambda: verify_checkpointing(lambda: build(model=on_meta)), "is on the meta device")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, "runs a function without arguments, got NoneType"),
        (torch.ones(1), "runs a function without arguments, got Tensor"),
        (build(), "runs a function without arguments, got tuple"),
        (Net(), "without arguments: missing a required argument: 'x'. Write for example lambda"),
        (lambda batch: batch, "without arguments: missing a required argument: 'batch'"),
        (batches, "a call of this generator or coroutine runs nothing of it"),
        (coroutine, "a call of this generator or coroutine runs nothing of it"),
    ],
)
def test_what_is_measured(wrong: Any, message: str) -> None:
    refused(lambda: measure_peak_memory(wrong), message)


def test_what_is_measured_may_raise_its_own() -> None:
    def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure_peak_memory(fails)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "3", None, float("nan"), 10**30])
def test_intervals(wrong: Any) -> None:
    refused(lambda: MemoryMonitor(wrong), "log_every must be")


@pytest.mark.parametrize(
    ("tracker", "step", "message"),
    [
        ("wandb", 0, r"a tracker needs a method log_scalar\(name, value, step\); str has none"),
        (print, 0, "a tracker needs a method log_scalar"),
        (MemoryMonitor, 0, "tracker must be an object, got the class MemoryMonitor"),
        (None, -1, "step must be a whole number of 0 or more, got -1"),
        (None, "3", "step must be a whole number of 0 or more, got '3'"),
        (0, MemoryMonitor(), "step must be a whole number of 0 or more, got MemoryMonitor"),
    ],
)
def test_samples(tracker: Any, step: Any, message: str) -> None:
    refused(lambda: MemoryMonitor().sample(tracker, step), message)
