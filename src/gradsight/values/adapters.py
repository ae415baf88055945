"""Which parameters belong to adapters (such as LoRA), and to which layer, by name. No torch."""

_PREFIXES = (
    *("lora_", "ia3_", "hada_", "lokr_", "oft_", "boft_", "hra_", "vera_lambda", "randlora_lambda"),
    *("adaption_", "prompt_encoder", "prompt_embeddings", "fourierft_", "vblora_", "c3a_"),
    *("bone_", "miss_", "road_", "shira_", "trainable_tokens_", "ln_tuning_"),
)
"""What the names of adapters begin with in peft; scripts with their own LoRA use `lora_` too."""


def is_of_an_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter.

    >>> is_of_an_adapter("layers.0.q_proj.lora_A.weight"), is_of_an_adapter("lm_head.weight")
    (True, False)
    """
    return any(part.lower().startswith(_PREFIXES) for part in name.split("."))


def layer_of(name: str) -> str:
    """Return the name of the layer that a parameter belongs to, without parts that wrap a weight.

    >>> layer_of("layers.0.q_proj.lora_A.default.weight"), layer_of("conv.weight_g")
    ('layers.0.q_proj', 'conv')
    >>> layer_of("conv.parametrizations.weight.original0")
    'conv'
    """
    parts = name.split(".")[:-1]
    for place, part in enumerate(parts):
        if part == "parametrizations" or part.lower().startswith(_PREFIXES):
            return ".".join(parts[:place])
    return ".".join(parts)
