# mypy: allow-untyped-calls
"""A build function's model as it would be trained: in another type, or with LoRA adapters."""

import warnings
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from gradsight.errors import UsageError
from gradsight.memory.lora_options import TYPES, Lora
from gradsight.memory.workload import Build, Workload, call_build


def in_type(build: Build, dtype: str) -> Build:
    """The build function with its model, and the numbers of its batch, in another type."""
    import torch
    from torch.utils._pytree import tree_map

    wanted = getattr(torch, TYPES[dtype])

    def converted(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(wanted)
        return value

    def built() -> tuple[Any, ...]:
        workload = call_build(build)
        workload.model.to(wanted)
        return _built(replace(workload, batch=tree_map(converted, workload.batch)))

    return built


def with_lora(build: Build, lora: Lora) -> Build:
    """The build function with its model frozen and adapters on it, which alone are trained."""
    if find_spec("peft") is None:
        raise UsageError("--lora needs the package 'peft'. Install it with: pip install peft")

    def built() -> tuple[Any, ...]:
        workload = call_build(build)
        return _built(replace(workload, model=adapted(workload.model, lora)))

    return built


def adapted(model: Any, lora: Lora) -> Any:
    """PEFT's model; where it knows no modules for the model's kind, all linear layers get one."""
    import peft

    def config(targets: Any) -> Any:
        return peft.LoraConfig(
            r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets
        )

    def made(targets: Any) -> Any:
        with warnings.catch_warnings():
            # Of layers that hold their weight the other way round: PEFT finds out by itself.
            warnings.simplefilter("ignore")
            return _in_their_type(peft.get_peft_model(model, config(targets)), lora)

    if lora.targets:
        return made(list(lora.targets))
    try:
        return made(None)
    except ValueError as error:
        if "target_modules" not in str(error):
            raise
    try:
        return made("all-linear")
    except ValueError as error:
        raise UsageError(
            f"PEFT knows no modules of {type(model).__name__} for adapters: {error}. Name them, "
            "for example --lora r=16,targets=query+value"
        ) from error


def _in_their_type(model: Any, lora: Lora) -> Any:
    """The model with its adapters in the type that was asked for, whatever the frozen model has."""
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, TYPES[lora.dtype]))
    return model


def _built(workload: Workload) -> tuple[Any, ...]:
    return workload.model, workload.batch, workload.loss_fn
