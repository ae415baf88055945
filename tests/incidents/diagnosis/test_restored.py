"""A diagnosis leaves no trace: bit for bit, and also where it breaks off in the middle."""

import itertools
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradsight.core.calls import RecordedCall
from gradsight.incidents.diagnosis.diagnose import DiagnosisOptions, diagnose
from gradsight.incidents.diagnosis.operation import find_operation
from gradsight.incidents.diagnosis.samples import SampleNorms, measure_samples
from gradsight.incidents.diagnosis.watcher import Budget, OutOfTime
from incidents.diagnosis.capture import captured
from incidents.diagnosis.faults import rows


class Busy(nn.Module):
    """Everything that a pass may change: buffers, attributes, generators, its own arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(6, 6)
        self.generator = torch.Generator().manual_seed(4)
        self.momentum = nn.Parameter(torch.ones(6), requires_grad=False)
        self.clipped = nn.Parameter(torch.ones(6) * 5, requires_grad=False)
        self.queue = torch.zeros(6)
        self.calls = 0
        self.fuse: Iterator[None] | None = None
        """The model breaks when it is used up; no replay puts it back."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = x.shape
        if self.fuse is not None and next(self.fuse, True):
            raise RuntimeError("the model broke")
        noise = torch.rand(6, generator=self.generator) + float(np.random.rand()) + random.random()
        x.add_(1.0)
        self.queue[self.calls % 6] += 1.0
        self.momentum.data = self.momentum.data * 0.9
        self.clipped.data.mul_(0.9)
        return self.last(self.drop(self.norm(self.first(x)))) * noise.log().log().nan_to_num(
            1.0
        ).clamp(1, 2)


def fingerprint(
    model: nn.Module, optimizer: torch.optim.Optimizer, passes: list[RecordedCall]
) -> dict[str, Any]:
    """Everything that must be the same afterwards: values as bytes, objects by identity."""
    modules = list(model.modules())
    return {
        "queue": _bits(model.queue),  # type: ignore[arg-type]
        "parameters": [
            (id(p), p.data_ptr(), p._version, p.requires_grad, _bits(p)) for p in model.parameters()
        ],
        "gradients": [
            (id(p.grad), None if p.grad is None else (p.grad._version, _bits(p.grad)))
            for p in model.parameters()
        ],
        "buffers": [(id(b), b._version, _bits(b)) for b in model.buffers()],
        "flags": [m.training for m in modules],
        "attributes": [{k: id(v) for k, v in vars(m).items()} for m in modules],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in modules
        ],
        "tensor hooks": [
            (id(p._backward_hooks), len(p._backward_hooks or ())) for p in model.parameters()
        ],
        "optimizer": pickle.dumps({k: str(v) for k, v in optimizer.state_dict().items()}),
        "own generator": model.generator.get_state().numpy().tobytes(),  # type: ignore[union-attr,operator]
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": pickle.dumps(np.random.get_state()),
        "python": random.getstate(),
        "arguments": [_bits(one.args[0]) for one in passes],
        "modes": (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_anomaly_enabled(),
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
        ),
    }


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def busy_step() -> tuple[Busy, torch.optim.Optimizer, list[RecordedCall], list[int]]:
    torch.manual_seed(0)
    model = Busy()
    model.norm.eval()
    model.last.bias.requires_grad_(False)
    fired: list[int] = []
    model.first.weight.register_hook(lambda g: fired.append(1))
    model.last.weight.register_post_accumulate_grad_hook(lambda p: fired.append(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(rows()).sum().backward()
    optimizer.step()
    with captured(model) as passes, torch.autocast("cpu", torch.bfloat16):
        for x in (rows(), rows((3, float("nan")))):
            model(x).float().square().mean().backward()
    fired.clear()
    return model, optimizer, passes, fired


@pytest.mark.parametrize("kind", ["nonfinite", "spike"])
def test_nothing_is_changed(kind: Any) -> None:
    model, optimizer, passes, fired = busy_step()
    before = fingerprint(model, optimizer, passes)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind=kind))
    assert_same(before, fingerprint(model, optimizer, passes))
    assert not fired
    assert {(sample.micro_batch, sample.row) for sample in found.samples} == {(1, 3)}


@pytest.mark.parametrize("calls", [0, 1, 2, 5])
def test_nothing_is_changed_when_the_model_breaks(calls: int) -> None:
    model, optimizer, passes, fired = busy_step()
    model.fuse = itertools.repeat(None, calls)
    before = fingerprint(model, optimizer, passes)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="nonfinite"))
    assert_same(before, fingerprint(model, optimizer, passes))
    assert not fired
    assert any(note.endswith("raised RuntimeError: the model broke") for note in found.notes), found


class Counted(Budget):
    """Time that is over after so many looks at the clock: at any point of a pass, in forward and in
    backward.
    """

    def __init__(self, looks: int) -> None:
        super().__init__(1.0)
        self.looks = looks

    def is_over(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_nothing_is_changed_wherever_time_runs_out() -> None:
    model, optimizer, passes, fired = busy_step()
    before = fingerprint(model, optimizer, passes)
    stopped = 0
    for looks in range(0, 150, 7):
        for work in (find_operation, measure_samples):
            budget, norms = Counted(looks), SampleNorms()
            try:
                work(
                    model,
                    *(
                        (passes[1], budget)
                        if work is find_operation
                        else ([passes[1]], budget, norms)
                    ),
                )
            except OutOfTime:
                stopped += 1
            assert_same(before, fingerprint(model, optimizer, passes))
    assert stopped > 20
    assert not fired


def test_time_that_is_over_is_said() -> None:
    model, _, passes, _ = busy_step()
    assert diagnose(model, passes, DiagnosisOptions(seconds=0, kind="nonfinite")).notes == (
        "the 0 s of the diagnosis were over while running micro-batch 0 again to find its operations",
        "the 0 s of the diagnosis were over while running micro-batch 0 again to find its samples",
    )


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    different = [name for name in before if before[name] != after[name]]
    assert not different


def test_the_guard_can_fail() -> None:
    model, optimizer, passes, _ = busy_step()
    before = fingerprint(model, optimizer, passes)
    model(rows())
    after = fingerprint(model, optimizer, passes)
    changed = {name for name in before if before[name] != after[name]}
    assert {
        "attributes",
        "torch",
        "numpy",
        "python",
        "own generator",
        "queue",
        "parameters",
    } <= changed


def test_training_goes_on_as_if_nothing_had_been_asked() -> None:
    """The weights after some steps are the same bits with and without a diagnosis in between."""
    ends = []
    for asked in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(4):
            with captured(model) as passes:
                model(torch.randn(8, 6)).square().mean().backward()
            if asked:
                diagnose(model, passes, DiagnosisOptions(seconds=60, kind="nonfinite"))
            optimizer.step()
            optimizer.zero_grad()
        ends.append([_bits(t) for t in model.state_dict().values()])
    assert ends[0] == ends[1]
