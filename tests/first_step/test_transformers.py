"""Models of Hugging Face's, made from their configuration: nothing is downloaded."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import gradsight
from gradsight.first_step.one_batch import look_at_batch
from gradsight.memory.workload import model_loss

WORDS = 64
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
IDS = torch.randint(2, WORDS, (4, 16), generator=torch.Generator().manual_seed(0))
ONES = torch.ones_like(IDS)
RESTARTS = torch.cat([torch.arange(6), torch.arange(10)]).repeat(4, 1)


def gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def llama(**changes: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, max_position_embeddings=32, **changes))


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    return hf.ViTForImageClassification(
        hf.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5)
    )


def masked() -> dict[str, Any]:
    hidden = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    return {
        "input_ids": IDS.masked_fill(hidden, 1),
        "labels": IDS.masked_fill(~hidden, -100),
        "attention_mask": ONES,
    }


MASK = torch.cat([torch.zeros_like(IDS[:, :5]), ONES[:, 5:]], 1)
PADDED = {
    "input_ids": IDS * MASK,
    "labels": IDS.masked_fill(MASK == 0, -100),
    "attention_mask": MASK,
}
SHIFTED = torch.cat([IDS[:, 1:], -100 * ONES[:, :1]], 1)
FEW = torch.cat([IDS[:1], -100 * ONES[1:]])
ENDED = IDS * (torch.arange(16) < torch.tensor([16, 9, 12, 5])[:, None])
CASES: dict[str, tuple[Any, Any, list[str]]] = {
    "GPT-2": (gpt2, {"input_ids": IDS, "labels": IDS}, []),
    "GPT-2, padded": (gpt2, PADDED, []),
    "GPT-2, padding counts": (gpt2, PADDED | {"labels": IDS * MASK}, ["GS613"]),
    "GPT-2, words are hidden": (gpt2, PADDED | {"input_ids": IDS, "labels": IDS}, []),
    "GPT-2, shifted twice": (gpt2, {"input_ids": IDS, "labels": SHIFTED}, ["GS612"]),
    "GPT-2, few samples": (gpt2, {"input_ids": IDS, "labels": FEW}, ["GS614"]),
    "GPT-2, evaluation mode": (lambda: gpt2().eval(), {"input_ids": IDS, "labels": IDS}, ["GS608"]),
    "GPT-2, no labels": (gpt2, {"input_ids": IDS, "labels": -100 * ONES}, ["GS606"]),
    "Llama": (llama, {"input_ids": IDS, "labels": IDS, "attention_mask": ONES}, []),
    "Llama, packed": (
        lambda: llama(use_cache=False),
        {"input_ids": IDS, "labels": IDS, "position_ids": RESTARTS},
        [],
    ),
    "Llama, packed, with a mask of its own": (
        llama,
        {"input_ids": IDS, "labels": IDS, "position_ids": RESTARTS, "attention_mask": ONES},
        ["GS603"],
    ),
    "BERT": (lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)), masked(), []),
    "T5": (t5, {"input_ids": IDS, "labels": IDS.flip(1)}, []),
    "T5, the same text": (t5, {"input_ids": IDS, "labels": IDS}, []),
    "T5, padding": (t5, {"input_ids": IDS, "labels": ENDED.masked_fill(ENDED == 0, -100)}, []),
    "T5, padding counts": (t5, {"input_ids": IDS, "labels": ENDED}, ["GS613"]),
    "ViT": (vit, {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.arange(4)}, []),
}


@pytest.mark.parametrize("name", CASES)
def test_models_are_judged_as_they_are(name: str) -> None:
    torch.manual_seed(0)
    make, batch, codes = CASES[name]
    report = gradsight.preflight(make(), batch)
    assert [each.code for each in report.findings if each.code.startswith("GS6")] == codes


@pytest.mark.parametrize("name", ["GPT-2", "GPT-2, padded", "Llama", "T5"])
def test_a_causal_model_was_looked_at(name: str) -> None:
    """Silence would be no wonder if nothing had been asked."""
    make, batch, _ = CASES[name]
    model = make()
    look = look_at_batch(model, batch, model_loss, list(model.parameters()))
    assert look.first.positions is not None
    assert look.first.positions.looks > 8
    assert look.first.positions.ratio < 1e-6
    assert look.first.rows is not None
