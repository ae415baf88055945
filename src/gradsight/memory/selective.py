# mypy: allow-untyped-calls
"""The results that a selectively checkpointed block keeps: those expensive to compute again."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _is_compiling,
    create_selective_checkpoint_contexts,
)

from gradsight.memory.kept_results import KeepingMode, KeptResults, ReusingMode
from gradsight.memory.operators import cost_per_byte
from gradsight.memory.policy import Mode

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
EXPENSIVE = (
    *PRODUCTS,
    *ATTENTION,
    "convolution",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


def contexts(mode: Mode) -> Callable[[], Contexts] | None:
    """The contexts in which torch runs a block and recomputes it; None where nothing is kept."""
    if mode.kind == "full":
        return None
    return partial(_contexts, mode)


def _contexts(mode: Mode) -> Contexts:
    keeper = Keeper(mode)
    # A compiler has no writes in place any more, and knows torch's own contexts alone.
    if _is_compiling(None, (), {}):
        return create_selective_checkpoint_contexts(keeper)  # type: ignore[no-any-return]
    # Torch's own are no use elsewhere: what they keep may be written to before it is needed, which
    # they miss (a product in 3-D is kept under another version counter) or end in an error.
    kept = KeptResults()
    return KeepingMode(kept, is_expensive, keeper.wants), ReusingMode(kept, is_expensive)


class Keeper:
    """Decides, call by call, what one run of one block keeps."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    def __call__(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # "Prefer" leaves torch.compile free to keep a result after all; "must" is binding.
        expensive = is_expensive(func, args, kwargs)
        if expensive and self.wants(func, args, kwargs, context.op_output):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def wants(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """Whether the result of this call of an expensive operator is kept."""
        if not self._mode.threshold:
            return True
        return cost_per_byte(func, args, kwargs, out) >= self._mode.threshold


def is_expensive(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator's result may be kept.

    An operator that draws random numbers is always run again: were it left out, every draw after it
    would differ from the forward pass, silently. Attention without dropout draws none. One that
    writes to a given tensor (`out=`) is run again too, or that tensor would stay unwritten.
    """
    packet = getattr(func, "_overloadpacket", None)
    if packet is None or packet.__name__ not in EXPENSIVE or func.namespace != "aten":
        return False
    if func._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return True
    return _dropout_of(func, args, kwargs) == 0


def _dropout_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The dropout probability of an attention operator; 1 where it cannot be told."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name != "dropout_p":
            continue
        if position < len(args):
            return float(args[position])
        return float(kwargs.get("dropout_p", argument.default_value))
    return 1.0
