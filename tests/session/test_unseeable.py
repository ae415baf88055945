"""What cannot be seen truly is refused before the first step, by classes of the same shape.

None of these packages is installed here, and CUDA graphs need what this machine lacks. A real FSDP1
is refused in tests/integrations/ranks.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsight
from gradsight.core.moments import MOMENTS
from gradsight.session import unseeable


def named(name: str, module: str, base: type = nn.Module) -> Any:
    """A class by this name, from this module."""
    return type(name, (base,), {"__module__": module})


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Optimizer:
    """Around another, as ZeRO's and Megatron's are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


MODELS = {
    "DeepSpeed steps inside backward": [
        ("DeepSpeedEngine", "deepspeed.runtime.engine"),
        ("PipelineEngine", "deepspeed.runtime.pipe.engine"),
    ],
    "Megatron has an optimizer": [
        ("DistributedDataParallel", "megatron.core.distributed.distributed_data_parallel"),
        ("MegatronEngine", "accelerate.utils.megatron_lm"),
    ],
    "FSDP1 keeps all parameters": [
        ("FullyShardedDataParallel", "torch.distributed.fsdp.fully_sharded_data_parallel")
    ],
    "CUDA graphs replay a step": [("CUDAGraphWrapper", "torchtitan.distributed.cuda_graph")],
}
OPTIMIZERS = {
    "DeepSpeed steps inside backward": [
        ("DeepSpeedZeroOptimizer", "deepspeed.runtime.zero.stage_1_and_2"),
        ("DeepSpeedOptimizerWrapper", "accelerate.utils.deepspeed"),
    ],
    "Megatron has an optimizer": [
        ("DistributedOptimizer", "megatron.core.optimizer.distrib_optimizer"),
        ("MegatronLMOptimizerWrapper", "accelerate.utils.megatron_lm"),
    ],
}


def rows(table: dict[str, list[tuple[str, str]]]) -> list[Any]:
    return [
        pytest.param(sentence, named, id=named[0])
        for sentence, each in table.items()
        for named in each
    ]


@pytest.mark.parametrize(("sentence", "kind"), rows(MODELS))
def test_a_model_that_cannot_be_seen(sentence: str, kind: Any, tmp_path: Path) -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inner = named(*kind, base=Wrapper)(net)
    for model in (inner, nn.Sequential(inner)):
        with pytest.raises(gradsight.GradsightError) as raised:
            gradsight.watch(model, optimizer, run_dir=tmp_path / "run")
        assert str(raised.value).startswith(sentence)
    assert not (tmp_path / "run").exists()
    assert not net._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize(("sentence", "kind"), rows(OPTIMIZERS))
@pytest.mark.parametrize("several", [False, True])
def test_an_optimizer_that_cannot_be_seen(sentence: str, kind: Any, several: bool) -> None:
    net = nn.Linear(2, 1)
    optimizer = named(*kind, base=Optimizer)(torch.optim.SGD(net.parameters(), lr=0.1))
    given = [optimizer] if several else optimizer
    with pytest.raises(gradsight.GradsightError) as raised:
        gradsight.watch(net, given)
    assert str(raised.value).startswith(sentence)


def test_the_sentences_are_those_that_were_agreed_on() -> None:
    assert unseeable.DEEPSPEED.endswith(
        "steps inside backward and keeps gradients in partitions; nothing true can be seen. "
        "Use FSDP2 or DDP, or train without Gradsight."
    )
    assert "gradient buffers of its own; nothing true can be seen" in unseeable.MEGATRON
    assert unseeable.FSDP1.endswith("Use FSDP2 (`fsdp_version: 2`).")
    assert unseeable.CUDA_GRAPHS.endswith("Switch them off to have steps recorded.")


@pytest.mark.parametrize(
    "kind",
    [
        ("FusedAdam", "deepspeed.ops.adam.fused_adam"),
        ("DeepSpeedCPUAdam", "deepspeed.ops.adam.cpu_adam"),
    ],
    ids=str,
)
def test_their_plain_optimizers_can_be_seen(kind: Any) -> None:
    net = nn.Linear(2, 1)
    optimizer = named(*kind, base=torch.optim.SGD)(net.parameters(), lr=0.1)
    assert unseeable.why_unseeable(net, [optimizer]) is None


def test_layers_of_megatron_can_be_seen() -> None:
    layer = named("ColumnParallelLinear", "megatron.core.tensor_parallel.layers", base=nn.Linear)
    assert unseeable.why_unseeable(nn.Sequential(layer(2, 1))) is None


def test_a_capture_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert unseeable.why_unseeable(nn.Linear(2, 1)) == unseeable.CUDA_GRAPHS


def test_nothing_is_listened_to_after_a_refusal() -> None:
    from gradsight.core import moments

    before = {moment: len(moments._told[moment]) for moment in MOMENTS}
    net = nn.Linear(2, 1)
    with pytest.raises(gradsight.GradsightError):
        gradsight.watch(named(*MODELS["DeepSpeed steps inside backward"][0], base=Wrapper)(net))
    assert before == {moment: len(moments._told[moment]) for moment in MOMENTS}
