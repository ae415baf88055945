"""GPT-2 models of Hugging Face, built from their configuration: no weights are downloaded."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradsight.core import limits, rundir
from gradsight.errors import MissingPackage, UsageError
from gradsight.train.config import ModelShape, Settings, from_dict, to_dict

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a GPT-2 model and the batch it is usually trained on."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    block_size: int
    batch_size: int


ARCHITECTURES = {
    "char": Architecture(
        layers=6, heads=6, width=384, vocabulary=256, block_size=256, batch_size=64
    ),
    "GPT2-Small": Architecture(
        layers=12, heads=12, width=768, vocabulary=50257, block_size=1024, batch_size=4
    ),
    "GPT2-Medium": Architecture(
        layers=24, heads=16, width=1024, vocabulary=50257, block_size=1024, batch_size=4
    ),
    "GPT2-Large": Architecture(
        layers=36, heads=20, width=1280, vocabulary=50257, block_size=1024, batch_size=4
    ),
}


_LAYER_BYTES = 1 << 20
"""What a layer's own objects take, generously; they take time to make, too."""


def architecture(name: str) -> Architecture:
    """The architecture of a name; "char" reads bytes and has about ten million parameters."""
    if name not in ARCHITECTURES:
        by_lower_case = {known.lower(): known for known in ARCHITECTURES}
        near = difflib.get_close_matches(name.lower(), by_lower_case, 1)
        meant = f" Did you mean {by_lower_case[near[0]]}?" if near else ""
        raise UsageError(
            f"unknown architecture {name!r}; known are {', '.join(ARCHITECTURES)}.{meant}"
        )
    return ARCHITECTURES[name]


def refuse_without_transformers(name: str) -> None:
    """Refuse a model of Hugging Face's where its package is missing, before anything is loaded."""
    MissingPackage.refuse("transformers", "hf", f"the model {name}")


def model_from_settings(settings: Mapping[str, Any]) -> "nn.Module":
    """The freshly initialised model of a run, from the settings in its config.json."""
    import torch

    train = settings.get("train", settings)
    shape = ModelShape(**(train.get("model") or {}))
    model = build_model(train.get("architecture", "char"), shape, train.get("block_size"))
    return model.to(getattr(torch, train.get("model_dtype", "float32")))


def bounded_model(train: Mapping[str, Any], tokens: int) -> "nn.Module":
    """The model of a run whose settings a stranger may have written.

    Its size, and what running so many tokens through it takes, are estimated before it is built.
    """
    settings = bounded_settings(train, tokens)
    return model_from_settings(to_dict(settings))


def bounded_settings(train: Mapping[str, Any], tokens: int) -> Settings:
    """What a model is built from, of settings in a config.json; refused where it is too large."""
    used = ("architecture", "model", "block_size", "model_dtype")
    settings = from_dict({key: train[key] for key in used if key in train}, rundir.CONFIG)
    usual = architecture(settings.architecture)
    shape = settings.model
    width = shape.n_embd or usual.width
    layers = shape.n_layer or usual.layers
    length = settings.block_size or usual.block_size
    words = (shape.vocab_size or usual.vocabulary) + length
    # Four bytes for each entry of GPT-2's matrices: 12 of width x width in a layer, and two tables.
    size = 4 * (12 * layers * width * width + words * width)
    # Masks, and what each layer takes however narrow it is.
    size += (layers + 4) * length * length + layers * _LAYER_BYTES
    # What backward keeps of a token: 17 vectors in each layer, its row of attention, its logits.
    heads = shape.n_head or usual.heads
    token = 4 * (layers * (17 * width + heads * length) + 2 * words)
    if size > limits.MODEL_BYTES or tokens * token > limits.ACTIVATION_BYTES:
        raise UsageError(
            f"{rundir.CONFIG} names {layers} layers, {width} wide, for {tokens:,} tokens: "
            f"more than a run's own settings are trusted with ({limits.MODEL_BYTES:,} bytes of "
            f"parameters, {limits.ACTIVATION_BYTES:,} of activations). Give the model with "
            "--build file.py:build"
        )
    return settings


def build_model(
    name: str, shape: ModelShape = ModelShape(), block_size: int | None = None
) -> "nn.Module":
    """A freshly initialised GPT-2 language model; every size is the architecture's unless given."""
    usual = architecture(name)
    width = shape.n_embd or usual.width
    heads = shape.n_head or _most_heads(width, usual.heads)
    if width % heads:
        raise UsageError(
            f"the width {width} cannot be shared among {heads} heads: "
            f"n_embd must be a multiple of n_head"
        )
    length = block_size or usual.block_size
    vocabulary = shape.vocab_size or usual.vocabulary
    dropout = shape.dropout
    if length < 1 or vocabulary < 1 or not 0 <= dropout < 1:
        raise UsageError(
            f"block_size and vocab_size must be 1 or more and dropout at least 0 and below 1, "
            f"got {length}, {vocabulary}, {dropout}"
        )
    refuse_without_transformers(name)
    import transformers

    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=shape.n_layer or usual.layers,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        # GPT-2's own, 50256, lies beyond a small vocabulary.
        bos_token_id=vocabulary - 1,
        eos_token_id=vocabulary - 1,
        use_cache=False,
    )
    model: Any = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model  # type: ignore[no-any-return]


def _most_heads(width: int, heads: int) -> int:
    """The most heads, up to the architecture's, that share a width equally."""
    return max(count for count in range(1, heads + 1) if width % count == 0)


def training_step(
    name: str, *, batch_size: int | None = None, block_size: int | None = None, dropout: float = 0.0
) -> "Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]":
    """A build function for measuring memory: the model and a batch of random tokens."""
    shape = architecture(name)
    size = batch_size or shape.batch_size
    length = block_size or shape.block_size
    if size < 1:
        raise UsageError(f"batch_size must be 1 or more, got {size}")
    refuse_without_transformers(name)

    def build() -> "tuple[Any, dict[str, torch.Tensor]]":
        import torch

        tokens = torch.randint(0, shape.vocabulary, (size, length))
        model = build_model(name, ModelShape(dropout=dropout), length)
        return model, {"input_ids": tokens, "labels": tokens}

    return build
