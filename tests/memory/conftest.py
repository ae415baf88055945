"""The table of models that every claim about memory is checked on.

A new model is one line and inherits every test.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

Build = Callable[[], tuple[Any, ...]]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small language model with tied weights."""

    def __init__(
        self, depth: int = 4, width: int = 32, heads: int = 2, vocab: int = 50, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def gpt(batch: int = 4, length: int = 33, **options: Any) -> tuple[Any, ...]:
    return GPT(**options), torch.randint(0, 50, (batch, length)), next_token_loss


def autocast_gpt() -> tuple[Any, ...]:
    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return next_token_loss(model, tokens)

    return GPT(), torch.randint(0, 50, (4, 33)), loss


def frozen_gpt() -> tuple[Any, ...]:
    model, *rest = gpt()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    return model, *rest


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(2, channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def convnet() -> tuple[Any, ...]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        Residual(8),
        Residual(8),
        Residual(8),
        nn.Flatten(),
        nn.Linear(8 * 14 * 14, 5),
    )
    return (
        model,
        (torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,))),
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    )


def encoder() -> tuple[Any, ...]:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return (
        nn.TransformerEncoder(layer, 3),
        (torch.randn(4, 16, 32),),
        lambda m, b: m(*b).square().mean(),
    )


def hf_gpt2(**options: Any) -> tuple[Any, ...]:
    import transformers

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50, n_positions=32, n_embd=32, n_layer=3, n_head=2, **options
        )
    )
    return model, _tokens()


def hf_llama() -> tuple[Any, ...]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config), _tokens()


def hf_t5() -> tuple[Any, ...]:
    import transformers

    config = transformers.T5Config(
        vocab_size=50,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), _tokens()


def hf_bert() -> tuple[Any, ...]:
    import transformers

    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=3,
    )
    mask = torch.ones(4, 32, dtype=torch.long)
    mask[:, 20:] = 0
    batch = {
        "input_ids": torch.randint(0, 50, (4, 32)),
        "attention_mask": mask,
        "labels": torch.randint(0, 3, (4,)),
    }
    return transformers.BertForSequenceClassification(config), batch


def hf_vit() -> tuple[Any, ...]:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 32, 32),
        "labels": torch.randint(0, 3, (4,)),
    }


def _tokens() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 50, (4, 32))
    return {"input_ids": tokens, "labels": tokens}


TABLE: dict[str, Build] = {
    "gpt": gpt,
    "gpt with dropout": lambda: gpt(dropout=0.1),
    "gpt in bf16": lambda: (gpt()[0].bfloat16(), *gpt()[1:]),
    "gpt under autocast": autocast_gpt,
    "gpt with a frozen block": frozen_gpt,
    "convolutions": convnet,
    "torch's encoder": encoder,
    "hf gpt2": hf_gpt2,
    "hf llama": hf_llama,
    "hf t5": hf_t5,
    "hf bert with a mask": hf_bert,
    "hf vit": hf_vit,
}


FIRST_TIER = ("gpt", "gpt with dropout", "convolutions", "hf gpt2")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models gain nothing from threads, and tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in FIRST_TIER else pytest.mark.slow) for name in TABLE
    ]
)
def build(request: pytest.FixtureRequest) -> Build:
    """Each model of the table in turn."""
    return TABLE[request.param]


@pytest.fixture
def table() -> dict[str, Build]:
    return TABLE


@pytest.fixture
def make_gpt() -> Callable[..., tuple[Any, ...]]:
    """The small language model, with options."""
    return gpt
