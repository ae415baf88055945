"""What a diagnosis cannot do, and how it says so."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from gradsight.incidents.diagnosis.diagnose import DiagnosisOptions, diagnose
from incidents.diagnosis.capture import captured, step
from incidents.diagnosis.faults import Body, Half, Length, rows, squared


def test_no_pass() -> None:
    found = diagnose(nn.Linear(2, 2), [], DiagnosisOptions(seconds=1, kind="nonfinite"))
    assert found.notes == ("no pass of this step was kept, so nothing could be run again",)


class SetClock:
    """A clock that stands still until it is set; no replay puts it back."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(nn.Linear):
    """Takes 0.02 s for a pass, by its own clock."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.clock = SetClock()

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += 0.02
        return super().forward(x)


def test_time_is_kept_to() -> None:
    model = Slow()
    passes, _ = step(model, [rows(count=500)] * 3, squared)
    options = DiagnosisOptions(seconds=2, kind="spike", most=None, clock=model.clock)
    found = diagnose(model, passes, options)
    assert 90 < len(found.samples) < 100  # one pass each, and one of the whole batch before
    assert all(sample.share is None for sample in found.samples)
    assert (
        found.notes[0]
        == "the 2 s of the diagnosis were over while running micro-batch 0 again to find its samples"
    )
    assert "samples were taken, not of all: no shares are given" in found.notes[1]


def test_the_likeliest_samples_come_first() -> None:
    model = Slow()
    x = rows((150, 1e4), count=200)
    passes, _ = step(model, [x], squared)
    options = DiagnosisOptions(seconds=0.05, kind="spike", clock=model.clock)
    measured = diagnose(model, passes, options)
    assert len(measured.samples) == 1
    assert measured.samples[0].row == 150


def test_gradients_that_were_not_kept() -> None:
    model = Body(Length())
    passes, _ = step(model, [rows((11, 0.0))], squared)
    passes[0] = replace(passes[0], output_gradients=None)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="nonfinite"))
    assert found.operation is None
    assert found.notes == (
        "running the model again to find its operations: "
        "the forward pass is clean; no gradients at the outputs were kept to look at backward with",
        "running the model again to find its samples: the gradients at the model's outputs were not kept",
    )


def test_reentrant_checkpointing_is_seen_through() -> None:
    class Reentrant(Body):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.middle, self.first(x), use_reentrant=True))

    torch.manual_seed(0)
    model = Reentrant(nn.Sequential(nn.Dropout(0.3), Length()))
    passes, _ = step(model, [rows((11, 0.0))], squared)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="nonfinite"))
    assert found.operation is not None, found.notes
    assert (found.operation.operation, found.operation.phase, found.operation.module) == (
        "sqrt",
        "backward",
        "middle.1",
    )
    assert [sample.row for sample in found.samples] == [11]
    assert found.notes == ()
    assert "apply" not in vars(CheckpointFunction)


def test_calls_without_a_gradient_are_no_trouble() -> None:
    model = nn.Linear(6, 6)
    with captured(model) as passes:
        with torch.no_grad():
            target = model(rows())
        (model(rows((3, 40.0))) - target).square().mean().backward()
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="spike", most=1))
    assert found.notes == ()
    assert [(sample.micro_batch, sample.row) for sample in found.samples] == [(1, 3)]


def test_parameters_spread_over_ranks_are_refused(one_rank: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(6, 6)
    with captured(model) as passes:
        squared(model, rows()).backward()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="nonfinite"))
    assert found.notes == (
        "the parameters are spread over ranks: "
        "one rank alone cannot run the step again without the others",
    )


def test_the_model_inside_data_parallel_is_run(one_rank: Any) -> None:
    model = nn.parallel.DistributedDataParallel(Body(Half()))
    passes, _ = step(model, [rows((2, 70.0))], squared)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="nonfinite"))
    assert found.operation is not None
    assert (found.operation.operation, found.operation.module) == ("to(float16)", "middle")
    assert [sample.row for sample in found.samples] == [2]
    model.zero_grad()
    squared(model, rows()).backward()  # the reducer has not noticed anything
    assert all(p.grad is not None for p in model.parameters())


@pytest.fixture
def one_rank(tmp_path: Any) -> Any:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()
