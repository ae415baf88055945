"""Several devices predicted in one process, against the real peaks of two and four gloo ranks."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

import warm
from gradsight.core.fake_group import fake_group
from gradsight.errors import UsageError
from gradsight.memory.plan import plan_step
from gradsight.memory.predict import predict_step
from gradsight.memory.setting import Ranks, StepSetting
from launch import run_ranks
from memory.rank_peaks_worker import BUILDS, build

WORKER = Path(__file__).with_name("rank_peaks_worker.py")


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [
        (2, ["small,ddp,full,sgd", "small,fsdp2,none,adamw"]),
        pytest.param(2, ["mixtral,fsdp2,full,sgd"], marks=pytest.mark.slow),
        pytest.param(4, ["small,ddp,none,adamw", "small,fsdp2,full,sgd"], marks=pytest.mark.slow),
    ],
)
def test_predicted_is_real(ranks: int, ways: list[str]) -> None:
    mixtral = any(way.startswith("mixtral") for way in ways)
    preload = warm.TRANSFORMERS if mixtral else ()
    printed = run_ranks(WORKER, *ways, ranks=ranks, preload=preload)
    real = json.loads(printed.splitlines()[-1])
    for way in ways:
        name, parallel, policy, optimizer = way.split(",")
        checkpointed = None if policy == "none" else policy
        setting = StepSetting(checkpointed, optimizer, ranks=Ranks(ranks, parallel))
        predicted = predict_step(BUILDS[name], setting).peak_bytes
        assert predicted == pytest.approx(real[way], rel=0.03), way


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_plan_on_several_devices(parallel: str) -> None:
    """What the plan says it takes is what is predicted under it."""
    ranks = Ranks(2, parallel)
    setting = StepSetting("full", "adamw", ranks=ranks)
    limit = int(1.1 * predict_step(build, setting).peak_bytes)
    plan = plan_step(build, limit, setting)
    assert plan.predicted_bytes <= limit
    under_it = StepSetting(plan.policy, "adamw", ranks=ranks)
    assert predict_step(build, under_it).peak_bytes == plan.predicted_bytes


def test_the_group_is_gone_afterwards() -> None:
    with fake_group(3) as mesh:
        assert (mesh.size(), dist.get_rank()) == (3, 0)
        with (
            pytest.raises(UsageError, match="a process group is initialised already"),
            fake_group(2),
        ):
            pass
    assert not dist.is_initialized()


@pytest.mark.parametrize(("count", "parallel"), [(1, "ddp"), (2, None), (0, None), (2, "hsdp")])
def test_ranks_that_cannot_be_meant(count: int, parallel: str | None) -> None:
    with pytest.raises(UsageError):
        Ranks(count, parallel)
