"""Checkpointing put on models: same names, same gradients, less memory, and off again."""

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradsight import apply_checkpointing, measure_peak_memory, plan_checkpointing
from gradsight.errors import GradsightError, UsageError
from gradsight.memory.checkpointed import CheckpointedForward
from memory.measured_step import model_and_backward

Build = Callable[[], tuple[Any, ...]]
CheckpointingPlan = inspect.signature(plan_checkpointing).return_annotation

BLOCKS = {
    "gpt": "blocks.{}",
    "convolutions": "{}",
    "torch's encoder": "layers.{}",
    "hf gpt2": "transformer.h.{}",
    "hf llama": "model.layers.{}",
    "hf bert with a mask": "bert.encoder.layer.{}",
    "hf vit": "vit.{}",
}


def gradients(build: Build, policy: str | None) -> tuple[dict[str, torch.Tensor], int]:
    torch.manual_seed(0)
    model, backward = model_and_backward(build())
    if policy is not None:
        apply_checkpointing(model, policy)
    peak = measure_peak_memory(backward).peak_bytes
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, peak


@pytest.mark.parametrize("policy", ["first:2", "selective@20", "full:0,selective:2-3"])
def test_every_policy(make_gpt: Callable[..., Any], policy: str) -> None:
    test_gradients_are_the_same_and_memory_less(lambda: make_gpt(dropout=0.1), policy)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_gradients_are_the_same_and_memory_less(build: Build, policy: str) -> None:
    plain, plain_peak = gradients(build, None)
    found, peak = gradients(build, policy)
    assert plain.keys() == found.keys()
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    assert peak < plain_peak


def test_names_types_and_state_stay(build: Build) -> None:
    model = build()[0]
    before = (
        [(name, type(module)) for name, module in model.named_modules()],
        list(model.state_dict()),
    )
    handle = apply_checkpointing(model)
    assert (
        [(name, type(module)) for name, module in model.named_modules()],
        list(model.state_dict()),
    ) == before
    assert len(handle.modes) >= 2
    handle.remove()
    handle.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_found(table: dict[str, Build], name: str) -> None:
    found = list(apply_checkpointing(table[name]()[0]).modes)
    assert len(found) in (3, 4)
    if name == "hf vit":
        assert all("layer" in block for block in found)
    else:
        start = 1 if name == "convolutions" else 0
        assert found == [BLOCKS[name].format(k + start) for k in range(len(found))]


def test_blocks_of_encoder_and_decoder(table: dict[str, Build]) -> None:
    assert list(apply_checkpointing(table["hf t5"]()[0]).modes) == [
        f"{part}.block.{k}" for part in ("encoder", "decoder") for k in (0, 1)
    ]


class Pair(nn.Module):
    """Two parts of one class as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(4, 4), nn.ReLU())


class Experts(nn.Module):
    """A block with a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))


def stages() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(*(Experts() for _ in range(2))) for _ in range(2)))


def test_outermost_blocks_and_stages() -> None:
    assert list(apply_checkpointing(Pair()).modes) == ["first", "second"]
    assert list(apply_checkpointing(nn.ModuleList(Experts() for _ in range(3))).modes) == [
        "0",
        "1",
        "2",
    ]
    assert list(apply_checkpointing(stages()).modes) == ["0.0", "0.1", "1.0", "1.1"]


def test_no_blocks() -> None:
    with pytest.raises(
        UsageError,
        match=r"no repeated blocks found in Sequential: .*Name them, for example "
        r"blocks=\['0', '2'\]",
    ):
        apply_checkpointing(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (["blocks.9"], "has no module 'blocks.9'; nearest: blocks"),
        ([], "must be a list of module names"),
        ("blocks.0", "must be a list of module names, as in .*, got 'blocks.0'"),
        (
            ["blocks.0", "blocks.0.mlp"],
            "must not lie in one another: 'blocks.0.mlp' is a part of 'blocks.0'",
        ),
    ],
)
def test_bad_blocks(make_gpt: Callable[..., Any], blocks: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        apply_checkpointing(make_gpt()[0], blocks=blocks)


def test_blocks_by_name(make_gpt: Callable[..., Any]) -> None:
    model = make_gpt()[0]
    assert apply_checkpointing(model, blocks=["blocks.1.mlp", "blocks.2"]).modes == {
        "blocks.1.mlp": "full",
        "blocks.2": "full",
    }


def test_a_plan_brings_its_blocks(make_gpt: Callable[..., Any]) -> None:
    plan = CheckpointingPlan("full:0,selective:1", ("blocks.1", "blocks.3"), 1, 0.0, 1, 1)
    assert apply_checkpointing(make_gpt()[0], plan).modes == {
        "blocks.1": "full",
        "blocks.3": "selective",
    }


def test_only_in_training_and_with_gradients(
    make_gpt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        "gradsight.memory.checkpointed.checkpoint",
        lambda run, *leaves, **_: calls.append(1) or run(*leaves),
    )
    model, tokens, _ = make_gpt()
    apply_checkpointing(model)
    model.eval()(tokens)
    with torch.no_grad():
        model.train()(tokens)
    assert not calls
    model(tokens)
    assert len(calls) == 4


def test_twice_is_refused(make_gpt: Callable[..., Any]) -> None:
    model = make_gpt()[0]
    with (
        apply_checkpointing(model),
        pytest.raises(UsageError, match=r"applied already, at blocks.0 \(Block\): call remove\(\)"),
    ):
        apply_checkpointing(model)
    apply_checkpointing(model)


def test_a_model_that_checkpoints_itself_is_refused(
    table: dict[str, Build], make_gpt: Callable[..., Any]
) -> None:
    from torch.distributed._composable import checkpoint as composable
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = table["hf gpt2"]()[0]
    model.gradient_checkpointing_enable()
    with pytest.raises(
        UsageError, match=r"checkpoints itself: call model.gradient_checkpointing_disable\(\)"
    ):
        apply_checkpointing(model)
    model = make_gpt()[0]
    composable(model.blocks[1])
    with pytest.raises(
        UsageError, match=r"blocks.1 \(Block\) is checkpointed by torch.distributed already"
    ):
        apply_checkpointing(model)
    model = make_gpt()[0]
    model.blocks[2] = checkpoint_wrapper(model.blocks[2])
    with pytest.raises(
        UsageError, match=r"blocks.2 \(CheckpointWrapper\) is checkpointed by torch.distributed"
    ):
        apply_checkpointing(model)


def test_only_modules(make_gpt: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"must be a torch.nn.Module, got tuple"):
        apply_checkpointing(make_gpt())


def test_copies_are_checkpointed_by_themselves(make_gpt: Callable[..., Any]) -> None:
    """A copy's block must run the copy's weights, not those of the model it was copied from."""
    model, tokens, _ = make_gpt()
    apply_checkpointing(model, "selective")
    buffer = io.BytesIO()
    torch.save(nn.ModuleDict({"m": model.blocks[0]}), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)["m"]
    copied = copy.deepcopy(model)
    for block in (loaded, copied.blocks[0]):
        assert isinstance(block.forward, CheckpointedForward)
        assert block.forward.module is block
    expected = model(tokens)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(model(tokens), expected)
    assert not torch.equal(copied(tokens), expected)


def test_a_forward_of_the_users_own_comes_back(make_gpt: Callable[..., Any]) -> None:
    model, tokens, _ = make_gpt()
    calls = []
    own = model.blocks[0].forward
    model.blocks[0].forward = mine = lambda x: calls.append(1) or own(x)
    with apply_checkpointing(model):
        model(tokens).sum().backward()
    assert len(calls) == 2, "once forward, once recomputed"
    assert model.blocks[0].forward is mine


class Shifted(nn.Module):
    """A block that takes a keyword tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, pair: tuple[torch.Tensor, float]) -> torch.Tensor:
        return torch.tanh(self.layer(x)) * pair[0].exp() * pair[1]


class Drifting(nn.Module):
    """Changes, in place, the tensor that its blocks were given by keyword, inside a tuple."""

    def __init__(self, drift: float) -> None:
        super().__init__()
        self.drift = drift
        self.blocks = nn.ModuleList(Shifted() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = torch.ones(4)
        for block in self.blocks:
            x = block(x, pair=(shift, 2.0))
            if self.drift:
                shift += self.drift
        return x.sum()


def test_keyword_tensors_changed_in_place_are_refused() -> None:
    model = Drifting(1.0)
    apply_checkpointing(model)
    with pytest.raises(
        GradsightError, match=r"shape \(4,\) that the block 'blocks.1' \(Shifted\) was given was"
    ):
        model(torch.ones(2, 4)).backward()
    steady = Drifting(0.0)
    apply_checkpointing(steady)
    steady(torch.ones(2, 4)).backward()


def test_hugging_face_caches_are_not_filled_twice(table: dict[str, Build]) -> None:
    model, batch = table["hf gpt2"]()
    apply_checkpointing(model.train())
    out = model(**batch, use_cache=True)
    out.loss.backward()
    assert out.past_key_values is None or out.past_key_values.get_seq_length() == 0


def test_autocast_reaches_the_recomputation(table: dict[str, Build]) -> None:
    model, tokens, loss = table["gpt under autocast"]()
    seen = []
    model.blocks[0].qkv.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    apply_checkpointing(model)
    loss(model, tokens).backward()
    assert seen == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_under_compile(make_gpt: Callable[..., Any], policy: str) -> None:
    """Checkpointing survives tracing as a whole graph; the eager backend keeps the test short."""
    model, tokens, loss = make_gpt(depth=2)
    loss(model, tokens).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    apply_checkpointing(model, policy)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss(compiled, tokens).backward()
    assert all(
        torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(plain, model.parameters(), strict=True)
    )
    model.zero_grad()
    torch._dynamo.reset()


def test_a_compiled_model_is_compiled_again(make_gpt: Callable[..., Any]) -> None:
    model, tokens, loss = make_gpt(depth=2)
    graphs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    loss(compiled, tokens).backward()
    apply_checkpointing(compiled)
    loss(compiled, tokens).backward()
    torch._dynamo.reset()
    assert ["tag_activation_checkpoint" in graph for graph in graphs] == [False, True]


def test_through_compiled_and_parallel_wrappers(make_gpt: Callable[..., Any]) -> None:
    model = make_gpt()[0]
    handle = apply_checkpointing(torch.compile(model))
    assert list(handle.modes) == [f"blocks.{k}" for k in range(4)]


def test_the_models_own_checkpointing_after_ours_is_refused() -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.zeros(1, 8, dtype=torch.long)
    handle = apply_checkpointing(model)
    model(input_ids=tokens, labels=tokens).loss.backward()
    model.gradient_checkpointing_enable()
    with pytest.raises(
        UsageError, match="switched on after apply_checkpointing: every block would"
    ):
        model(input_ids=tokens, labels=tokens)
    handle.remove()
    model(input_ids=tokens, labels=tokens).loss.backward()
