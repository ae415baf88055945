"""The table of models that every claim of the ghost engine is tested on: one entry, all tests."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, VALIDATION = 4, 3


@dataclass(frozen=True)
class Case:
    """A model with a training batch, a validation batch and a loss function."""

    model: nn.Module
    batch: Any
    validation: Any
    loss_fn: Callable[[nn.Module, Any], Tensor]


def tokens(rows: int, length: int, vocabulary: int = 40, seed: int = 0) -> Tensor:
    return torch.randint(
        1, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that a Hugging Face model computes itself."""
    return model(**batch).loss


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1))


def quiet(config: Any) -> Any:
    """A configuration whose special tokens are within the small vocabulary."""
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    config.loss_type = None
    return config


def causal(model: nn.Module, masked: bool = True) -> Case:
    def batch(rows: int, seed: int) -> dict[str, Tensor]:
        ids = tokens(rows, 7, seed=seed)
        labels = ids.clone()
        if masked:
            labels[0, :4] = -100
        return {"input_ids": ids, "labels": labels}

    return Case(model, batch(BATCH, 1), batch(VALIDATION, 2), own_loss)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    return causal(
        GPT2LMHeadModel(
            quiet(GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2))
        )
    )


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return causal(LlamaForCausalLM(quiet(config)))


def qwen2() -> Case:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return causal(Qwen2ForCausalLM(quiet(config)), masked=False)


def mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, experts_implementation="eager",
    )  # fmt: skip
    return causal(MixtralForCausalLM(quiet(config)), masked=False)


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )

    def batch(rows: int, seed: int) -> dict[str, Tensor]:
        mask = torch.ones(rows, 6, dtype=torch.long)
        mask[0, 4:] = 0
        return {
            "input_ids": tokens(rows, 6, seed=seed),
            "attention_mask": mask,
            "labels": tokens(rows, 5, seed=seed + 9),
        }

    return Case(
        T5ForConditionalGeneration(quiet(config)), batch(BATCH, 1), batch(VALIDATION, 2), own_loss
    )


def encoder(model: nn.Module) -> Case:
    def batch(rows: int, seed: int) -> dict[str, Tensor]:
        mask = torch.ones(rows, 7, dtype=torch.long)
        mask[0, 3:] = 0
        mask[-1, 5:] = 0
        return {
            "input_ids": tokens(rows, 7, seed=seed),
            "attention_mask": mask,
            "labels": tokens(rows, 1, 3, seed)[:, 0],
        }

    return Case(model, batch(BATCH, 1), batch(VALIDATION, 2), own_loss)


def bert() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=8, num_labels=3,
    )  # fmt: skip
    return encoder(BertForSequenceClassification(quiet(config)))


def albert() -> Case:
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(
        vocab_size=40, embedding_size=8, hidden_size=16,
        num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=8, num_labels=3,
    )  # fmt: skip
    return encoder(AlbertForSequenceClassification(quiet(config)))


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )

    def batch(rows: int, seed: int) -> dict[str, Tensor]:
        return {
            "pixel_values": floats(rows, 3, 8, 8, seed=seed),
            "labels": tokens(rows, 1, 3, seed)[:, 0],
        }

    return Case(ViTForImageClassification(config), batch(BATCH, 1), batch(VALIDATION, 2), own_loss)


def lora() -> Case:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    base = GPT2LMHeadModel(
        quiet(GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2))
    )
    settings = LoraConfig(
        r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, init_lora_weights=False
    )
    return causal(get_peft_model(base, settings))


def classifier(model: nn.Module, inputs: Callable[[int, int], Tensor], classes: int = 3) -> Case:
    """A model from floats to [rows, classes]."""

    def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        return inputs(rows, seed), tokens(rows, 1, classes, seed)[:, 0]

    return Case(model, batch(BATCH, 1), batch(VALIDATION, 2), cross_entropy)


def convnet() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=2, dilation=2, padding=2, padding_mode="circular"), nn.GELU(),
        nn.Conv2d(8, 4, 1, padding="same", bias=False), nn.Flatten(), nn.Linear(100, 3),
    )  # fmt: skip
    return classifier(model, lambda rows, seed: floats(rows, 3, 10, 10, seed=seed))


class ConvolutionsOfAllDimensions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(2, 4, 3, padding=1)
        self.three = nn.Conv3d(1, 2, 2, stride=(1, 2, 1))
        self.up = nn.ConvTranspose1d(4, 2, 2, stride=2)
        self.head = nn.Linear(16 + 12, 3)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(F.relu(self.one(x[:, :2, :4])))
        deep = self.three(x.reshape(-1, 1, 2, 4, 4)[:, :, :, :, :4])
        return self.head(torch.cat([wide.flatten(1), deep.flatten(1)[:, :12]], 1))


def convolutions() -> Case:
    return classifier(
        ConvolutionsOfAllDimensions(), lambda rows, seed: floats(rows, 4, 8, seed=seed)
    )


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=batch_first)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, (last, _) = self.lstm(x)
        return self.head(last[-1] + out.mean(1 if self.batch_first else 0))


def lstm() -> Case:
    return classifier(Recurrent(batch_first=True), lambda rows, seed: floats(rows, 7, 5, seed=seed))


def lstm_time_first() -> Case:
    return classifier(
        Recurrent(batch_first=False), lambda rows, seed: floats(7, rows, 5, seed=seed)
    )


class Translator(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's advice about inference
            self.transformer = nn.Transformer(
                8, 2, 1, 1, dim_feedforward=12, dropout=0.0, batch_first=batch_first
            )
        self.head = nn.Linear(8, 3)

    def forward(self, pair: Tensor) -> Tensor:
        source, target = (pair[:, :4], pair[:, 4:]) if self.batch_first else (pair[:4], pair[4:])
        return self.head(self.transformer(source, target))


def translator(batch_first: bool) -> Case:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        shape = (rows, 7) if batch_first else (7, rows)
        labels = tokens(*shape, 3, seed)
        return floats(*shape, 8, seed=seed), labels[:, 4:] if batch_first else labels[4:]

    return Case(Translator(batch_first), batch(BATCH, 1), batch(VALIDATION, 2), loss_fn)


def transformer() -> Case:
    return translator(batch_first=True)


def transformer_time_first() -> Case:
    return translator(batch_first=False)


def mlp() -> Case:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.RMSNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    )
    return classifier(model, lambda rows, seed: floats(rows, 6, seed=seed))


class Oddities(nn.Module):
    """Parameters used in every way that modules do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 6, padding_idx=3)
        self.positions = nn.Embedding(8, 6)
        self.shift = nn.Parameter(floats(6, seed=3))
        self.scale = nn.Parameter(floats(7, 1, seed=4))
        self.mixer = nn.Parameter(floats(2, 3, 3, seed=5))
        self.matrix = nn.Parameter(floats(6, 6, seed=6))
        self.query = nn.Parameter(floats(1, 1, 6, seed=7))
        self.shared = nn.Linear(6, 6)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.bilinear = nn.Bilinear(6, 6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)[None])
        x += self.shift
        x = self.scale * x / self.temperature
        x = torch.einsum("bthc,hcd->bthd", x.unflatten(-1, (2, 3)), self.mixer).flatten(2)
        x = self.shared(torch.tanh(self.shared(x @ self.matrix)))
        x = x - F.linear(x, self.matrix.T, self.shift * 2)
        start = self.query.expand(x.shape[0], -1, -1)
        x = torch.cat([start, x], 1)
        attended = F.scaled_dot_product_attention(self.query.expand(x.shape[0], 2, -1), x, x)
        x = self.bilinear(self.normed(x), self.frozen(x)) + attended.mean(1, keepdim=True)
        return x.mean(1) @ self.table.weight.T[:, :3]


def oddities() -> Case:
    def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        return tokens(rows, 7, 10, seed), tokens(rows, 1, 3, seed)[:, 0]

    return Case(Oddities(), batch(BATCH, 1), batch(VALIDATION, 2), cross_entropy)


class Experts(nn.Module):
    """Tokens are gathered across samples, sent to experts, and scattered back."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.inputs = nn.Linear(5, 6)
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        flat = x.flatten(0, 1)
        weights = self.router(flat).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            (where,) = torch.where(chosen == i)
            if self.in_place:
                out.index_add_(0, where, weights[where, i, None] * expert(flat[where]))
            else:
                out = out.index_add(0, where, weights[where, i, None] * expert(flat[where]))
        return self.head(out.view_as(x).mean(1))


def experts() -> Case:
    return classifier(Experts(in_place=False), lambda rows, seed: floats(rows, 7, 5, seed=seed))


def experts_in_place() -> Case:
    return classifier(Experts(in_place=True), lambda rows, seed: floats(rows, 8, 5, seed=seed))


class LossOnly(nn.Module):
    """Returns nothing but its loss, as many a training script's model does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x).flatten(0, 1), y.flatten(), ignore_index=0)


def loss_only() -> Case:
    def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        labels = tokens(rows, 7, 3, seed)
        labels[0, :5] = 0
        return floats(rows, 7, 5, seed=seed), labels

    return Case(LossOnly(), batch(BATCH, 1), batch(VALIDATION, 2), lambda model, pair: model(*pair))


class Checkpointed(nn.Module):
    """Activation checkpointing without re-entrance, around blocks with shared and derived
    parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.inputs(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(1))


def checkpointed() -> Case:
    return classifier(Checkpointed(), lambda rows, seed: floats(rows, 7, 5, seed=seed))


MODELS: dict[str, Callable[[], Case]] = {
    build.__name__: build
    for build in (
        gpt2, llama, qwen2, mixtral, t5, bert, albert, vit, lora, convnet,
        convolutions, lstm, lstm_time_first, transformer,
        transformer_time_first, mlp, oddities, experts, experts_in_place, loss_only, checkpointed,
    )
}  # fmt: skip

UNEQUAL = {"gpt2", "llama", "lora", "loss_only"}
"""Models whose labels are partly ignored: their loss is not the mean of the samples' own losses."""


def build(name: str, dtype: torch.dtype = torch.float64) -> Case:
    """An entry of the table in a type, always with the same weights."""
    torch.manual_seed(0)
    case = MODELS[name]()
    case.model.to(dtype)
    return Case(case.model, cast(case.batch, dtype), cast(case.validation, dtype), case.loss_fn)


def cast(batch: Any, dtype: torch.dtype) -> Any:
    return torch.utils._pytree.tree_map(
        lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, batch
    )


def rows_of(batch: Any, model: nn.Module) -> list[Any]:
    """The batch as batches of one sample."""
    time_first = getattr(model, "batch_first", True) is False
    tensors = list(batch.values()) if isinstance(batch, dict) else list(batch)
    size = tensors[0].shape[1 if time_first else 0]

    def one(t: Tensor, i: int) -> Tensor:
        return t[:, i : i + 1] if time_first and t.dim() > 1 else t[i : i + 1]

    if isinstance(batch, dict):
        return [{k: one(t, i) for k, t in batch.items()} for i in range(size)]
    return [tuple(one(t, i) for t in batch) for i in range(size)]
