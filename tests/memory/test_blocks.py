"""Which modules count as blocks: by structure, by the calls of a step, by name and by pattern."""

from typing import Any

import pytest
import torch
from torch import nn

from gradsight import (
    apply_checkpointing,
    measure_peak_memory,
    plan_checkpointing,
    predict_peak_memory,
    verify_checkpointing,
)
from gradsight.errors import UsageError

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class SharedOne(nn.Module):
    """Calls its one block six times, and another part once."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = self.block(x)
        return self.head(x)


class Stage(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(depth) for depth in (2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def shared_one() -> tuple[Any, ...]:
    return SharedOne(), torch.randn(64, WIDTH), loss


def step_peak(model: nn.Module, batch: Any) -> int:
    return measure_peak_memory(lambda: loss(model, batch).backward()).peak_bytes


def test_one_block_that_is_called_many_times() -> None:
    model, batch, _ = shared_one()
    plain = step_peak(model, batch)
    model.zero_grad()
    handle = apply_checkpointing(model, check=batch, loss_fn=loss)
    assert handle.modes == {"block": "full"}
    measured = step_peak(model, batch)
    assert measured < plain
    predicted = predict_peak_memory(shared_one, policy="full", optimizer=None)
    assert predicted.peak_bytes == measured
    assert verify_checkpointing(shared_one).passed
    plan = plan_checkpointing(shared_one, (measured + plain) // 2, optimizer=None)
    assert plan.blocks == ("block",)
    handle.remove()
    assert list(apply_checkpointing(model, plan).modes) == ["block"]


def test_without_a_batch_it_is_asked_for() -> None:
    with pytest.raises(UsageError, match="calls one block several times, check=batch finds it"):
        apply_checkpointing(SharedOne())


def test_stages_give_way_to_their_layers() -> None:
    expected = ["stages.0.layers.0", "stages.0.layers.1"]
    expected += [f"stages.1.layers.{number}" for number in range(3)]
    assert list(apply_checkpointing(Staged()).modes) == expected
    batch = torch.randn(64, WIDTH)
    peaks = []
    for blocks in (None, ["stages.0", "stages.1"]):
        model = Staged()
        apply_checkpointing(model, blocks=blocks)
        peaks.append(step_peak(model, batch))
    assert peaks[0] < peaks[1]


def test_many_small_parts_in_each_block_stay_inside() -> None:
    """Thirty blocks of two parts: an input for each part would cost more than it saves."""
    model = nn.ModuleList(Stage(2) for _ in range(30))
    assert list(apply_checkpointing(model).modes) == [str(number) for number in range(30)]


def albert() -> tuple[Any, ...]:
    import transformers

    config = transformers.AlbertConfig(
        vocab_size=32,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
    )
    tokens = torch.randint(0, 32, (4, 16))
    return transformers.AlbertForMaskedLM(config), {"input_ids": tokens, "labels": tokens}


def swin() -> tuple[Any, ...]:
    import transformers

    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 2, (2,))}
    return transformers.SwinForImageClassification(config), batch


def peak(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    model.train()
    return measure_peak_memory(lambda: model(**batch).loss.backward()).peak_bytes


def test_albert() -> None:
    plain = peak(*albert())
    model, batch = albert()
    assert list(apply_checkpointing(model).modes) == ["albert.encoder.albert_layer_groups.0"]
    measured = peak(model, batch)
    assert measured < plain
    predicted = predict_peak_memory(albert, policy="full", optimizer=None)
    assert predicted.peak_bytes == measured


def test_swin_saves_what_the_library_saves() -> None:
    model, batch = swin()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    library = peak(model, batch)
    model, batch = swin()
    handle = apply_checkpointing(model)
    assert list(handle.modes) == [
        f"swin.encoder.layers.{stage}.blocks.{layer}" for stage in (0, 1) for layer in (0, 1)
    ]
    assert peak(model, batch) <= library


PATTERNS = (
    (["blocks.[02]"], ["blocks.0", "blocks.2"]),
    (["blocks.*"], ["blocks.0", "blocks.1", "blocks.2"]),
    (
        ["blocks.?.up", "blocks.1.down"],
        ["blocks.0.up", "blocks.1.up", "blocks.2.up", "blocks.1.down"],
    ),
    (["*up"], ["blocks.0.up", "blocks.1.up", "blocks.2.up"]),
    (["blocks.2", "blocks.[!2]"], ["blocks.2", "blocks.0", "blocks.1"]),
)


@pytest.mark.parametrize(("patterns", "expected"), PATTERNS, ids=lambda value: value[0])
def test_shell_patterns(patterns: list[str], expected: list[str]) -> None:
    model = nn.ModuleDict({"blocks": nn.Sequential(*(Block() for _ in range(3)))})
    assert list(apply_checkpointing(model, blocks=patterns).modes) == expected


def test_patterns_that_match_nothing_or_too_much() -> None:
    model = nn.ModuleDict({"blocks": nn.Sequential(*(Block() for _ in range(3)))})
    with pytest.raises(UsageError, match=r"no module like 'layers.\*'; it has blocks"):
        apply_checkpointing(model, blocks=["layers.*"])
    with pytest.raises(UsageError, match="must not lie in one another"):
        apply_checkpointing(model, blocks=["blocks.*", "blocks.0.up"])


def prefix_tuned() -> tuple[Any, ...]:
    import peft
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tokens = torch.randint(0, 32, (2, 8))
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), prefix)
    return model, {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("selective", "first:2", "full:1")
        ),
    ],
)
def test_prefix_tuning(policy: str) -> None:
    report = verify_checkpointing(prefix_tuned, policy=policy)
    assert report.gradients_identical, report.cause
    predicted = predict_peak_memory(prefix_tuned, policy=policy)
    assert predicted.peak_bytes == report.optimized_bytes


class HeldTwice(nn.Module):
    """performer-pytorch holds its layers under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Two(64) for _ in range(4)))
        self.helper = nn.ModuleDict({"of": self.net})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


class Two(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def test_a_plan_for_modules_with_two_names_can_be_applied() -> None:
    def build() -> tuple[Any, ...]:
        return HeldTwice(), (torch.randn(512, 64),)

    peaks = [predict_peak_memory(build, policy=policy).peak_bytes for policy in (None, "full")]
    plan = plan_checkpointing(build, sum(peaks) // 2)
    assert plan.blocks == ("net.0", "net.1", "net.2", "net.3")
    apply_checkpointing(build()[0], plan).remove()


class Leaves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.c = nn.ModuleList([nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 3)])
        self.h = nn.Linear(4, 4)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.net = nn.Module()
        layers = ({"attention": Two(4), "mlp": nn.Sequential(nn.Linear(4, 4))} for _ in range(2))
        self.net.layers = nn.ModuleList(nn.ModuleDict(layer) for layer in layers)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Leaves(), ["c.0", "c.1", "h"]),
        (Nested(), ["net.layers.0.attention", "net.layers.0.mlp", "net.layers.1.attention"]),
        (nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Conv1d(3, 3, 1))), ["0.0", "0.1"]),
        (nn.Sequential(nn.Linear(3, 3)), None),
    ],
)
def test_suggested_blocks_can_be_used(model: nn.Module, names: list[str] | None) -> None:
    with pytest.raises(UsageError) as refusal:
        apply_checkpointing(model)
    if names is None:
        assert "Name them" not in str(refusal.value)
        return
    assert f"Name them, for example blocks={names}" in str(refusal.value)
    assert list(apply_checkpointing(model, blocks=names).modes) == names
