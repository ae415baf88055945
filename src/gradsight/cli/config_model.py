"""A Hugging Face configuration as a training step: its folder, its file, or a name in the cache.

Nothing is downloaded, and no code of the configuration's own is run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsight.core import rundir
from gradsight.errors import UsageError
from gradsight.memory.lora_options import TYPES
from gradsight.train.models import refuse_without_transformers

if TYPE_CHECKING:
    import torch

USUAL_LENGTH = 1024
"""Tokens in a sample where none are asked for and the model takes as many."""
USUAL_BATCH = 1
OWN_CODE = "use file.py:build, with a function that returns (model, batch)"


def names_build_function(place: str) -> bool:
    """Whether a place on the command line is file.py:build, and not a configuration."""
    return place.endswith(".py") or ".py:" in place


def load_config(place: str) -> Any:
    """The configuration, which must be one of a causal language model that transformers has."""
    _refuse_missing_path(place)
    refuse_without_transformers(place)
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=False, local_files_only=True)
    except OSError as error:
        raise UsageError(_not_found(place, error)) from error
    except Exception as error:
        # transformers has no class of its own for "this needs code": the texts differ by release.
        reason = str(error).strip().split("\n")[0]
        raise UsageError(
            f"{place} cannot be read as a configuration without code of its own: {reason}. "
            f"If its model is code of your own, {OWN_CODE}"
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(
            f"{place} is a {type(config).__name__}, which transformers has no causal language "
            f"model for: {OWN_CODE}"
        )
    return config


def _refuse_missing_path(place: str) -> None:
    """Refuse what can only be meant as a path and is none, before anything is imported."""
    if not place.strip():
        raise UsageError("the model's name is empty: give a configuration or file.py:build")
    path = Path(place)
    is_path = path.is_absolute() or place.startswith(".") or place.endswith(".json")
    if is_path and not path.exists():
        raise UsageError(f"there is no file or folder {place}")
    if path.is_dir() and not (path / rundir.CONFIG).is_file():
        raise UsageError(f"{place} has no {rundir.CONFIG} in it")


def _not_found(place: str, error: OSError) -> str:
    if Path(place).exists():
        return f"{place} cannot be read as a configuration: {str(error).splitlines()[0]}"
    return (
        f"{place} is no folder, no file, and not in Hugging Face's local cache; nothing is "
        f"downloaded. Give the folder or the file of its {rundir.CONFIG}, or load it once with "
        "transformers.AutoConfig.from_pretrained"
    )


def usual_length(config: Any) -> int:
    """Tokens in a sample where none are asked for."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and longest > 0:
        return min(USUAL_LENGTH, longest)
    return USUAL_LENGTH


def dtype_of(config: Any) -> str | None:
    """Return the type that a configuration names for its parameters, as --dtype spells it."""
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    full_name = str(named).removeprefix("torch.")
    return next((short for short, name in TYPES.items() if name == full_name), None)


def config_step(
    config: Any, batch_size: int, block_size: int, dtype: str = "float32"
) -> "Callable[[], tuple[Any, dict[str, torch.Tensor]]]":
    """A build function: the model from its configuration, and tokens that are their own labels."""
    words = config.get_text_config().vocab_size

    def build() -> "tuple[Any, dict[str, torch.Tensor]]":
        import torch
        from transformers import AutoModelForCausalLM

        tokens = torch.randint(0, words, (batch_size, block_size))
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=False
        )
        return model, {"input_ids": tokens, "labels": tokens}

    return build
