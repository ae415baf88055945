"""Model families whose steps ask for values: layer drop, checks of labels, masks, experts."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

Step = tuple[Any, dict[str, torch.Tensor]]
WORDS = 99


def tokens(samples: int = 4, length: int = 32) -> torch.Tensor:
    return torch.randint(3, WORDS, (samples, length))


def with_labels(model: Any) -> Step:
    given = tokens()
    return model, {"input_ids": given, "labels": given}


def sequence_to_sequence(name: str, **options: Any) -> Callable[[], Step]:
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "vocab_size": WORDS}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    widths = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}

    def build() -> Step:
        config = getattr(hf, f"{name}Config")(**sizes, **heads, **widths, **options)
        return with_labels(getattr(hf, f"{name}ForConditionalGeneration")(config))

    return build


def speech(name: str, *, masked: bool = False, layerdrop: float = 0.0) -> Callable[[], Step]:
    def build() -> Step:
        config = getattr(hf, f"{name}Config")(
            vocab_size=32,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            conv_dim=[16, 16],
            conv_kernel=[10, 3],
            conv_stride=[5, 2],
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=2,
            layerdrop=layerdrop,
        )
        batch = {"input_values": torch.randn(2, 1000), "labels": torch.randint(1, 32, (2, 10))}
        if masked:
            batch["attention_mask"] = torch.ones(2, 1000, dtype=torch.long)
        return getattr(hf, f"{name}ForCTC")(config), batch

    return build


def experts(name: str, *, loop: bool = False, **options: Any) -> Callable[[], Step]:
    def build() -> Step:
        config = getattr(hf, f"{name}Config")(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            **options,
        )
        if loop:
            config._experts_implementation = "eager"
        return with_labels(getattr(hf, f"{name}ForCausalLM")(config))

    return build


def whisper() -> Step:
    config = hf.WhisperConfig(
        vocab_size=WORDS,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=50,
        max_target_positions=40,
        num_mel_bins=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    batch = {"input_features": torch.randn(2, 8, 100), "labels": tokens(2)}
    return hf.WhisperForConditionalGeneration(config), batch


def albert_with_a_mask() -> Step:
    shape = {"hidden_size": 32, "embedding_size": 16, "num_hidden_layers": 2}
    config = hf.AlbertConfig(vocab_size=WORDS, num_attention_heads=2, intermediate_size=64, **shape)
    model, batch = with_labels(hf.AlbertForMaskedLM(config))
    return model, {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def swin() -> Step:
    """Layers inside of stages."""
    config = hf.SwinConfig(
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        num_labels=3,
    )
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 3, (4,))}
    return hf.SwinForImageClassification(config), batch


DEEPSEEK = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
EXACT: dict[str, Callable[[], Step]] = {
    "bart": sequence_to_sequence("Bart"),
    "mbart": sequence_to_sequence("MBart"),
    "pegasus": sequence_to_sequence("Pegasus"),
    "whisper": whisper,
    "wav2vec2": speech("Wav2Vec2"),
    "wav2vec2 with a mask": speech("Wav2Vec2", masked=True),
    "hubert": speech("Hubert"),
    "albert with a mask": albert_with_a_mask,
    "mixtral": experts("Mixtral", num_local_experts=4),
    "qwen3 moe": experts(
        "Qwen3Moe", num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2, head_dim=16
    ),
    "deepseek": experts("DeepseekV3", **DEEPSEEK),
}
