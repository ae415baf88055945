"""What checkpointing must not change, and that a change is caught, located and explained."""

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradsight import verify_checkpointing
from gradsight.errors import GradsightError, UsageError
from gradsight.memory.differences import compare_snapshots, take_snapshot
from gradsight.values.memory import CheckpointingPlan, CheckpointingReport, MemoryUse

Build = Callable[[], tuple[Any, ...]]


def test_honest_models_pass(build: Build) -> None:
    report = verify_checkpointing(build)
    assert report.gradients_identical, (report.first_difference, report.cause)
    assert report.first_difference is None
    assert 0 < report.reduction < 1
    assert 0 < report.ceiling < 1
    assert report.passed


def test_work_and_memory_add_up(make_gpt: Callable[..., Any]) -> None:
    full, selective, none = (
        verify_checkpointing(make_gpt, policy=p, optimizer=None)
        for p in ("full", "selective", "none")
    )
    assert 0.2 < full.extra_flops < 0.34
    assert selective.extra_flops == 0
    assert none.extra_flops == none.reduction == 0
    assert none.gradients_identical
    assert not none.passed, "nothing was saved"
    assert full.optimized_bytes < selective.optimized_bytes < none.optimized_bytes
    assert full.reduction < full.ceiling + 0.01


def test_verification_leaves_randomness_alone(make_gpt: Callable[..., Any]) -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    verify_checkpointing(make_gpt, optimizer=None)
    with pytest.raises(GradsightError, match="names block"):
        verify_checkpointing(make_gpt, policy="first:9")
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


class Faulty(nn.Module):
    """A block whose fault is a module or a function of its hidden values."""

    def __init__(self, fault: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.fault = fault
        self.outer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.fault(self.inner(x))))


def faulty(make: Callable[[], nn.Module]) -> Build:
    def build() -> tuple[Any, ...]:
        model = nn.Sequential(*(Faulty(make()) for _ in range(3)), nn.Linear(16, 1))
        return model, torch.randn(400, 16), lambda m, b: m(b).square().mean()

    return build


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.bernoulli(torch.full_like(x, 0.5), generator=self.source)


class NumpyMask(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(np.random.rand(*x.shape)).to(x)


class NumpyGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(self.rng.random(x.shape)).to(x)


class PythonDraw(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class Growing(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x if self.calls > 1 else x.exp().log()


@pytest.mark.parametrize(
    ("make", "cause", "where"),
    [
        (
            OwnGenerator,
            r"^own generator: 0\.fault\.source is a torch\.Generator, and only torch's own",
            "fault",
        ),
        (NumpyMask, r"^numpy randomness in [012]\.fault", "fault"),
        (NumpyGenerator, r"^own generator: 0\.fault\.rng is a numpy\.Generator", "fault"),
        (PythonDraw, r"^Python's random randomness in [012]\.fault", "fault"),
        (
            lambda: nn.BatchNorm1d(16),
            r"^BatchNorm statistics: 0\.fault updates its running mean",
            "the buffer 0.fault.running_mean",
        ),
        (
            lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
            r"^spectral norm: 0\.fault\.param",
            "fault",
        ),
        (
            Counting,
            r"^something in [012]\.fault gives another result when it is run again",
            "fault",
        ),
    ],
)
def test_faults_are_caught(make: Callable[[], nn.Module], cause: str, where: str) -> None:
    report = verify_checkpointing(faulty(make))
    assert not report.gradients_identical
    assert not report.passed
    assert report.optimized_bytes < report.baseline_bytes, "less memory alone must not pass"
    assert report.first_difference is not None
    assert report.cause is not None
    assert re.search(cause, report.cause), report.cause
    assert any(part in report.first_difference for part in where.split("|")), (
        report.first_difference
    )


def test_old_style_spectral_norm_is_caught() -> None:
    report = verify_checkpointing(faulty(lambda: nn.utils.spectral_norm(nn.Linear(16, 16))))
    assert report.cause is not None
    assert report.cause.startswith("spectral norm: 0.fault")


def test_rrelu_at_the_end_of_a_block_is_caught() -> None:
    def build() -> tuple[Any, ...]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.RReLU()) for _ in range(3)))
        return model, torch.randn(2000, 16), lambda m, b: m(b).square().mean()

    report = verify_checkpointing(build)
    assert not report.passed
    assert report.first_difference == "the gradient of 0.0.weight differs, with 5 more"
    assert report.cause is not None
    assert report.cause.startswith("RReLU: the slopes that 0.1 drew are lost in recomputation")


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) * mask.exp()


class Marching(nn.Module):
    """Its mask is changed in place from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(16)
        for block in self.blocks:
            x = block(x, mask=mask)
            mask += 0.5
        return x.square().mean()


class MarchingGently(Marching):
    """As above, where plain autograd does not mind: the mask itself is not needed for backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(16)
        for block in self.blocks:
            x = block(x, mask=mask)
            with torch.no_grad():
                mask += 0.5
        return x.square().mean()


@pytest.mark.parametrize("model", [Marching, MarchingGently])
def test_keyword_tensors_changed_in_place_are_caught(model: type[nn.Module]) -> None:
    report = verify_checkpointing(lambda: (model(), torch.randn(8, 16), lambda m, b: m(b)))
    assert not report.passed
    assert report.cause is not None
    assert report.cause.startswith("a tensor that a block was given is changed in place")
    assert report.first_difference is not None
    assert (
        "raised WrittenInPlace: a tensor of shape (16,) that the block" in report.first_difference
    )


def test_another_path_is_caught() -> None:
    report = verify_checkpointing(faulty(Growing))
    assert report.cause is not None
    assert report.cause.startswith("a block runs other operations the second time")


def test_a_step_that_is_never_the_same_is_named() -> None:
    source = torch.Generator().manual_seed(5)

    class Wandering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)
            self.outer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x))

    def build() -> tuple[Any, ...]:
        batch = torch.randn(8, 16, generator=source)
        return nn.Sequential(Wandering(), Wandering()), batch, lambda m, b: m(b).square().mean()

    report = verify_checkpointing(build)
    assert not report.gradients_identical
    assert report.first_difference == "the loss differs"
    assert report.cause is not None
    assert report.cause.startswith("the plain step itself is different each time")


def test_a_generator_outside_the_module_is_found() -> None:
    source = torch.Generator()

    class Closed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand(x.shape, generator=source)

    def build() -> tuple[Any, ...]:
        source.manual_seed(7)
        return faulty(Closed)()

    report = verify_checkpointing(build)
    assert report.cause is not None
    assert report.cause.startswith("own generator: source is a torch.Generator")


def test_a_plan_of_chosen_blocks_is_explained_too() -> None:
    plan = CheckpointingPlan("full", ("1", "2"), 1, 0.0, 1, 1)
    report = verify_checkpointing(faulty(NumpyMask), policy=plan)
    assert report.policy == "full"
    assert report.cause is not None
    assert re.match(r"numpy randomness in [12]\.fault", report.cause)


def test_every_bit_counts() -> None:
    model = nn.Linear(3, 1)
    model(torch.ones(1, 3)).sum().backward()
    before = take_snapshot(model, torch.zeros(1))
    assert not compare_snapshots(before, take_snapshot(model, torch.zeros(1)))
    assert model.weight.grad is not None
    model.weight.grad.view(torch.int32)[0, 1] += 1
    found = compare_snapshots(before, take_snapshot(model, torch.zeros(1)))
    assert found.gradients == ("weight",)
    assert found.first() == "the gradient of weight differs"
    model.bias.grad = None
    assert (
        compare_snapshots(before, take_snapshot(model, torch.zeros(1))).first()
        == "the gradient of weight differs, with 1 more"
    )
    assert compare_snapshots(before, take_snapshot(model, -torch.zeros(1))).loss, (
        "minus zero is not zero"
    )


def test_what_does_not_fit_is_not_run(
    make_gpt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradsight.memory.verify.available_memory", lambda device="cpu": 1_000_000)
    with pytest.raises(
        GradsightError,
        match=r"the plain step needs .* 1\.00 MB is available here\. Verify with a smaller batch",
    ):
        verify_checkpointing(make_gpt)


def test_bad_policies_are_refused_before_anything_runs(make_gpt: Callable[..., Any]) -> None:
    def build() -> tuple[Any, ...]:
        model, tokens, _ = make_gpt()
        return model, tokens, lambda m, b: pytest.fail("it ran")

    with pytest.raises(UsageError, match="names block 8, but the model has 4 blocks"):
        verify_checkpointing(build, policy="first:9")
    with pytest.raises(UsageError, match="no repeated blocks"):
        verify_checkpointing(lambda: (nn.Linear(3, 3), torch.ones(1, 3), lambda m, b: m(b).sum()))


@pytest.mark.parametrize(
    ("policy", "cause"),
    [("none", "the policy 'none' recomputes no block"), ("full", "larger batch")],
)
def test_a_step_that_saves_nothing_has_a_cause(policy: str, cause: str) -> None:
    def build() -> tuple[Any, ...]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256)) for _ in range(3)))
        return model, torch.ones(1, 256), lambda m, b: m(b).sum()

    report = verify_checkpointing(build, policy=policy)
    assert (report.passed, report.gradients_identical) == (False, True)
    assert report.cause is not None
    assert cause in report.cause


def test_the_report_as_numbers() -> None:
    plain, less = MemoryUse(1000, {"activations": 600}, flops=100), MemoryUse(700, {}, flops=133)
    report = CheckpointingReport("full", plain, less, gradients_identical=True)
    assert report.scalars() == {
        "checkpointing/baseline_gb": 1e-6,
        "checkpointing/optimized_gb": 7e-7,
        "checkpointing/reduction": pytest.approx(0.3),
        "checkpointing/ceiling": 0.6,
        "checkpointing/extra_flops": pytest.approx(0.33),
        "checkpointing/gradients_identical": 1.0,
        "checkpointing/passed": 1.0,
    }
