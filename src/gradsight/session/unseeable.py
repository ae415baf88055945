"""Ways of training in which nothing true can be seen: known before the first step, and said so.

They are told by the classes at work. None of these packages is imported here.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from gradsight.core.devices import is_anything_capturing
from gradsight.core.optimizers import innermost_optimizer
from gradsight.errors import CannotBeSeen

_OR_WITHOUT = "Use FSDP2 or DDP, or train without Gradsight."
DEEPSPEED = (
    "DeepSpeed steps inside backward and keeps gradients in partitions; nothing true can be seen. "
    f"{_OR_WITHOUT}"
)
MEGATRON = (
    "Megatron has an optimizer and gradient buffers of its own; nothing true can be seen. "
    f"{_OR_WITHOUT}"
)
FSDP1 = (
    "FSDP1 keeps all parameters of a block in one flat parameter; no gradient can be told from "
    "another. Use FSDP2 (`fsdp_version: 2`)."
)
CUDA_GRAPHS = (
    "CUDA graphs replay a step without calling backward; nothing can be seen. "
    "Switch them off to have steps recorded."
)

_BY_MODULE = (
    # Not all of these packages: DeepSpeed's fused optimizers and Megatron's layers can be seen.
    ("deepspeed.runtime.", DEEPSPEED),
    ("megatron.core.distributed", MEGATRON),
    ("megatron.core.optimizer", MEGATRON),
    ("megatron.model.distributed", MEGATRON),
    ("megatron.optimizer", MEGATRON),
)
_BY_NAME = (
    # Accelerate's own classes around the two, and torch's first FSDP.
    ("DeepSpeedEngine", DEEPSPEED),
    ("DeepSpeedOptimizer", DEEPSPEED),
    ("MegatronEngine", MEGATRON),
    ("MegatronLMOptimizer", MEGATRON),
    ("FullyShardedDataParallel", FSDP1),
    ("CUDAGraphWrapper", CUDA_GRAPHS),
    ("FullCudaGraphWrapper", CUDA_GRAPHS),
)


def why_unseeable(model: object, optimizers: Iterable[object] = ()) -> str | None:
    """One sentence, what stands in the way and the way out; None where nothing does."""
    for thing in (*_modules(model), *_with_inner(optimizers)):
        for kind in type(thing).__mro__:
            sentence = _sentence(kind)
            if sentence is not None:
                return sentence
    # A watch that is opened inside of a capture is there for one step, and sees no replay of it.
    if is_anything_capturing():
        return CUDA_GRAPHS
    return None


def refuse_unseeable(model: object, optimizer: object) -> None:
    """Refuse to watch what cannot be seen; a record of it would look like one of a true run."""
    optimizers: Iterable[object] = (optimizer,)
    if isinstance(optimizer, list | tuple):
        optimizers = optimizer
    sentence = why_unseeable(model, optimizers)
    if sentence is not None:
        raise CannotBeSeen(sentence)


def _sentence(kind: type) -> str | None:
    for module, sentence in _BY_MODULE:
        if kind.__module__.startswith(module):
            return sentence
    for name, sentence in _BY_NAME:
        if kind.__name__.startswith(name):
            return sentence
    return None


def _modules(model: object) -> Iterator[object]:
    yield model
    if isinstance(model, nn.Module):
        yield from model.modules()


def _with_inner(optimizers: Iterable[object]) -> Iterator[Any]:
    for optimizer in optimizers:
        yield optimizer
        yield innermost_optimizer(optimizer)
