"""Blocks that write in place: gradients bit for bit those of plain training, in every mode.

A table of writes, each in two to four dimensions, with and without bias, under every policy; then
what must be refused, and that it is refused in words.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from gradsight import apply_checkpointing, measure_peak_memory, plan_checkpointing
from gradsight.errors import GradsightError
from gradsight.memory import selective

WIDTH = 8
SHAPES = {"2-D": (6, WIDTH), "3-D": (3, 4, WIDTH), "4-D": (2, 3, 2, WIDTH)}
POLICIES = ("full", "selective", "selective@1", "first:2", "full:0,selective:1-2")
Tensors = torch.Tensor
Write = Callable[[torch.Tensor, torch.Tensor], Any]
WRITES: dict[str, Write] = {}


def write(function: Write) -> Write:
    """Add a write to the table: it changes h, a product's result, and may read x."""
    WRITES[function.__name__] = function
    return function


@write
def adds(h: Tensors, x: Tensors) -> None:
    h += x


@write
def scales(h: Tensors, x: Tensors) -> None:
    h.mul_(2)


@write
def relu(h: Tensors, x: Tensors) -> None:
    F.relu_(h)


@write
def twice(h: Tensors, x: Tensors) -> None:
    h.add_(1)
    h.sigmoid_()


@write
def dropout(h: Tensors, x: Tensors) -> None:
    F.dropout(h, 0.3, training=True, inplace=True)


@write
def a_column(h: Tensors, x: Tensors) -> None:
    h[..., 0] = 0


@write
def a_slice(h: Tensors, x: Tensors) -> None:
    h[1:, ..., 2:5] += x[1:, ..., 2:5]


@write
def by_mask(h: Tensors, x: Tensors) -> None:
    h[x > 0] = 0.5


@write
def masked_fill(h: Tensors, x: Tensors) -> None:
    h.masked_fill_(x > 0, 3.0)


@write
def by_index(h: Tensors, x: Tensors) -> None:
    h.index_add_(0, torch.tensor([0, 1]), x[:2])


@write
def through_a_flat_view(h: Tensors, x: Tensors) -> None:
    h.view(-1)[3:20].mul_(-2)


@write
def through_a_transposed_view(h: Tensors, x: Tensors) -> None:
    h.transpose(0, -1)[1].add_(1)


@write
def through_a_detached_name(h: Tensors, x: Tensors) -> None:
    h.detach().mul_(2)


@write
def through_data(h: Tensors, x: Tensors) -> None:
    h.data.mul_(2)


@write
def without_gradients(h: Tensors, x: Tensors) -> None:
    with torch.no_grad():
        h.clamp_(-0.1, 0.1)


@write
def several_at_once(h: Tensors, x: Tensors) -> None:
    with torch.no_grad():
        torch._foreach_add_([h, x.clone()], 1.0)


@write
def a_copy_into_it(h: Tensors, x: Tensors) -> None:
    h[..., :4].copy_(x[..., :4])


class Writer(nn.Module):
    """Writes to the result of its first product."""

    def __init__(self, name: str, bias: bool) -> None:
        super().__init__()
        self.write = WRITES[name]
        self.first = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.second = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.write(h, x)
        return self.second(torch.sin(h))


class LateWriter(Writer):
    """Writes to the result of its last product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.sin(self.first(x)))
        self.write(y, x)
        return torch.tanh(y)


class Adapted(Writer):
    """An adapter whose share is added to the frozen layer's result in place."""

    def __init__(self, name: str, bias: bool) -> None:
        super().__init__(name, bias)
        self.first.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h += self.up(self.down(x))
        self.write(h, x)
        return self.second(torch.sin(h))


class Scores(Writer):
    """Attention by hand: scaled and masked in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.first(x) @ x.transpose(-1, -2)
        scores /= 3
        scores += torch.ones_like(scores).triu(1) * -9
        mixed = torch.softmax(scores, -1) @ self.second(x)
        self.write(mixed, x)
        return torch.sin(mixed)


class Convolved(Writer):
    """A convolution with an activation in place."""

    def __init__(self, name: str, bias: bool) -> None:
        super().__init__(name, bias)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        channels_first = x.reshape(x.shape[0], -1, WIDTH).transpose(1, 2).contiguous()
        h = self.conv(channels_first)
        self.write(h, channels_first)
        return self.second(torch.sin(h).transpose(1, 2)).reshape(x.shape)


class Autocast(Writer):
    """The products are in bf16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.first(x)
            self.write(h, x.to(h.dtype))
            return self.second(torch.sin(h)).float()


class Prepared(Writer):
    """A product that writes where it is told to, below the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            place = torch.empty(x.numel() // WIDTH, WIDTH)
            torch.mm(x.reshape(-1, WIDTH), self.first.weight, out=place)
        h = self.first(x) * place.reshape(x.shape)
        self.write(h, x)
        return self.second(torch.sin(h))


FORMS = (Writer, LateWriter, Adapted, Scores, Convolved, Autocast, Prepared)
IN_EVERY_FORM = ("adds", "dropout", "a_column", "through_a_flat_view", "through_data")
"""The other writes are tried in one form, so that the table stays short."""


@dataclass(frozen=True)
class Case:
    form: type[Writer]
    write: str
    shape: tuple[int, ...]
    bias: bool

    def build(self) -> tuple[nn.Module, torch.Tensor, Any]:
        torch.manual_seed(0)
        blocks = (self.form(self.write, self.bias) for _ in range(3))
        return nn.Sequential(*blocks), torch.randn(self.shape), loss


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def gradients(case: Case, policy: Any) -> list[torch.Tensor | None]:
    model, batch, _ = case.build()
    model.train()
    if policy is not None:
        apply_checkpointing(model, policy)
    loss(model, batch).backward()
    return [parameter.grad for parameter in model.parameters()]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def cases(form: type[Writer]) -> list[Case]:
    """The writes in every shape, with and without bias."""
    names = WRITES if form is Writer else IN_EVERY_FORM
    return [
        Case(form, name, shape, bias)
        for name in names
        for shape in SHAPES.values()
        for bias in (False, True)
        if not (form is Scores and len(shape) == 2)
    ]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_write_under_every_policy(form: type[Writer]) -> None:
    wrong = []
    for case in cases(form):
        policies = ("full", "selective")
        if form is Writer and case.write in IN_EVERY_FORM:
            policies = POLICIES
        plain = gradients(case, None)
        wrong += [
            (case.write, case.shape, case.bias, policy)
            for policy in policies
            if not same(plain, gradients(case, policy))
        ]
    assert not wrong


@pytest.mark.parametrize("name", ["adds", "dropout", "a_column", "through_data"])
def test_writes_under_a_plan(name: str) -> None:
    case = Case(Writer, name, (32, 8, WIDTH), bias=False)
    model, batch, _ = case.build()
    peak = measure_peak_memory(lambda: loss(model, batch).backward()).peak_bytes
    plan = plan_checkpointing(case.build, 0.9 * peak, optimizer=None)
    assert plan.policy != "none"
    assert same(gradients(case, None), gradients(case, plan))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_no_product_is_run_again_for_it(form: type[Writer]) -> None:
    def flops(policy: str | None) -> int:
        model, batch, _ = Case(form, "adds", SHAPES["3-D"], bias=False).build()
        if policy is not None:
            apply_checkpointing(model, policy)
        return measure_peak_memory(lambda: loss(model, batch).backward()).flops

    told_where = 0
    if form is Prepared:  # the product that writes to a given tensor must be
        told_where = 3 * 2 * WIDTH * 3 * 4 * WIDTH
    assert flops("selective") == flops(None) + told_where


class TwoResults(nn.Module):
    """Returns a product that it goes on with, so that its caller may write to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.first(x)
        return h, self.second(torch.sin(h * 2))


class WritingCaller(nn.Module):
    """Writes to what its blocks returned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoResults() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h, x = block(x)
            h += 1
            x = x + h
            x *= 2
        return x


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_results_that_the_caller_writes_to(shape: tuple[int, ...], policy: str) -> None:
    found = []
    for applied in (None, policy):
        torch.manual_seed(0)
        model = WritingCaller()
        if applied is not None:
            apply_checkpointing(model, applied)
        loss(model, torch.randn(shape)).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert same(*found)


def test_a_second_backward_through_the_same_graph() -> None:
    """What was kept is given away once; the second time it is computed again."""
    found = []
    for policy in (None, "selective"):
        model, batch, _ = Case(Writer, "adds", SHAPES["3-D"], bias=False).build()
        if policy is not None:
            apply_checkpointing(model, policy)
        value = loss(model, batch)
        value.backward(retain_graph=True)
        value.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert same(*found)


def gemma3n() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers

    config = transformers.Gemma3nTextConfig(
        vocab_size=32,
        vocab_size_per_layer_input=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        hidden_size_per_layer_input=4,
        laurel_rank=4,
        num_kv_shared_layers=0,
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        activation_sparsity_pattern=[0.95, 0.0, 0.0],
    )
    tokens = torch.randint(0, 32, (2, 8))
    return transformers.Gemma3nForCausalLM(config), {"input_ids": tokens, "labels": tokens}


class LowRank(nn.Module):
    """A linear layer with an adapter in parallel, as LoRA has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        result += self.up(F.dropout(self.down(x), 0.1, self.training))
        return result


def lora_llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.mlp.up_proj = LowRank(layer.mlp.up_proj)
    tokens = torch.randint(0, 32, (2, 8))
    return model, {"input_ids": tokens, "labels": tokens}


def peft_llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
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
    low_rank = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "up_proj"])
    tokens = torch.randint(0, 32, (2, 8))
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), low_rank)
    return model, {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("build", [gemma3n, lora_llama, peft_llama])
def test_models_that_write_in_place(build: Callable[[], tuple[nn.Module, Any]]) -> None:
    plain = None
    for policy in (None, "full", "selective", "first:2"):
        torch.manual_seed(0)
        model, batch = build()
        model.train()
        if policy is not None:
            apply_checkpointing(model, policy)
        torch.manual_seed(1)
        model(**batch).loss.backward()
        found = [parameter.grad for parameter in model.parameters()]
        plain = plain or found
        assert same(plain, found), policy


def with_torchs_own_contexts(mode: Any) -> Any:
    return create_selective_checkpoint_contexts(selective.Keeper(mode))


def test_the_table_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own contexts the same cases are wrong in silence, or end in a bare error."""
    monkeypatch.setattr(selective, "_contexts", with_torchs_own_contexts)
    monkeypatch.setattr(selective, "contexts", lambda mode: lambda: with_torchs_own_contexts(mode))
    silent = Case(Writer, "adds", SHAPES["3-D"], bias=False)
    assert not same(gradients(silent, None), gradients(silent, "selective"))
    for case in (
        Case(Writer, "adds", SHAPES["2-D"], bias=False),
        Case(Writer, "adds", SHAPES["3-D"], bias=True),
    ):
        with pytest.raises(RuntimeError, match="selective activation checkpoint has been mutated"):
            gradients(case, "selective")


class Given(nn.Module):
    """A block that writes to what it is given, where plain training does not mind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1  # guilty: Given
        return self.layer(torch.sin(x))


class GivenPastAutograd(Given):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.data.mul_(2)  # guilty: GivenPastAutograd
        return self.layer(torch.sin(x))


class OwnWeights(Given):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.weight.data.mul_(0.9)  # guilty: OwnWeights
        return self.layer(torch.sin(x))


def place_of(marker: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith(f"# guilty: {marker}"))
    return rf"\({re.escape(__file__)}:{number}\)"


REFUSED = {
    Given: rf"writes in place to what it is given {place_of('Given')}",
    GivenPastAutograd: rf"writes in place to what it is given {place_of('GivenPastAutograd')}",
    OwnWeights: rf"writes other values to its own parameters {place_of('OwnWeights')}",
}


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_writes_to_what_is_not_its_own_are_refused(kind: type[Given], policy: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), kind())
    loss(model, torch.randn(4, WIDTH)).backward()
    apply_checkpointing(model, policy, blocks=["1", "2"])
    with pytest.raises(GradsightError, match=rf"block '1' \({kind.__name__}\) {REFUSED[kind]}"):
        loss(model, torch.randn(4, WIDTH))


class Clamped(Given):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.weight.data.clamp_(-9, 9)
        return self.layer(torch.sin(x))


def test_a_write_that_changes_no_value_is_none() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Clamped(), Clamped())
    apply_checkpointing(model, blocks=["1", "2"])
    loss(model, torch.randn(4, WIDTH)).backward()


@dataclass
class Mask:
    """No pytree knows this class."""

    values: torch.Tensor


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: Mask) -> torch.Tensor:
        return torch.tanh(self.layer(x)) * mask.values.exp()


def test_writes_to_tensors_in_objects_are_refused() -> None:
    blocks = nn.ModuleList(Masked() for _ in range(2))
    apply_checkpointing(blocks)
    mask = Mask(torch.ones(WIDTH))
    out = blocks[0](torch.randn(4, WIDTH), mask)
    mask.values.add_(1)
    with pytest.raises(GradsightError, match=r"the block '0' \(Masked\) was given was written to"):
        out.sum().backward()


def test_weights_that_change_before_backward_are_refused() -> None:
    model, batch, _ = Case(Writer, "adds", SHAPES["3-D"], bias=False).build()
    apply_checkpointing(model)
    value = loss(model, batch)
    with torch.no_grad():
        model[1].second.weight.mul_(2)
    with pytest.raises(
        GradsightError, match=r"parameter 'second.weight' of the block '1' \(Writer\) was written"
    ):
        value.backward()
