"""Activation checkpointing put on a model and taken off again; names, types and state stay."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradsight.core.parameters import check_module, unwrapped
from gradsight.core.torch_names import refuse_unknown_torch
from gradsight.errors import UsageError
from gradsight.memory.blocks import blocks_meant, find_blocks
from gradsight.memory.called_blocks import blocks_of
from gradsight.memory.checkpointed import (
    CheckpointedForward,
    CheckpointingHandle,
    checkpoints_itself,
)
from gradsight.memory.policy import parse_policy
from gradsight.memory.step_check import StepCheck
from gradsight.memory.workload import checked_workload
from gradsight.values.memory import CheckpointingPlan


def apply_checkpointing(
    model: nn.Module,
    policy: str | CheckpointingPlan = "full",
    *,
    blocks: Sequence[str] | None = None,
    check: object = None,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None,
) -> CheckpointingHandle:
    """Let the model's blocks recompute their activations in backward instead of keeping them.

    Acts in training mode and where gradients are wanted, and nowhere else. Apply it before or after
    DistributedDataParallel, fully_shard and torch.compile (which then compiles again). `remove()`
    on what is returned takes it off.

    model: the model, inside any wrapper.
    policy: "full" recomputes every block; "selective" keeps the results of products and attention;
      "first:K" recomputes the first K blocks; or a CheckpointingPlan.
    blocks: the modules that count as blocks, by name or shell pattern ("encoder.layer.[02]"); None
      finds them.
    check: a batch, as build() returns it elsewhere: one step is run plain and one checkpointed, and
      all that `verify_checkpointing` compares is compared. Nothing of it stays; where the steps
      differ, an error names the guilty block, and nothing is applied.
    loss_fn: loss_fn(model, batch) of the check; None: the batch is the model's arguments, and the
      loss is found in its output.
    """
    refuse_unknown_torch("memory")
    check_module(model)
    inner = unwrapped(model)
    refuse_second_checkpointing(inner)
    if check is None and loss_fn is not None:
        raise UsageError("loss_fn is the loss of the check: give check=batch as well")
    blocks = blocks_meant(policy, blocks)
    workload = None
    if check is not None:
        workload = checked_workload(inner, check, loss_fn)
        blocks = blocks_of(workload, blocks)
    named = find_blocks(inner, blocks)
    modes = parse_policy(policy, len(named))
    owners = {name: _flag_owners(inner, name) for name, _ in named}
    chosen = list(zip(named, modes, strict=True))
    if workload is not None:
        StepCheck(workload, chosen).refuse_differences()
    return CheckpointingHandle(chosen, owners)


def refuse_second_checkpointing(model: nn.Module) -> None:
    """Two layers of checkpointing recompute twice, or break: say how to take the first off."""
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module.__dict__.get("forward"), CheckpointedForward):
            raise UsageError(
                f"checkpointing is applied already, at {where}: call remove() on the handle that "
                "was returned"
            )
        if checkpoints_itself(module):
            raise UsageError(
                f"{where} checkpoints itself: call model.gradient_checkpointing_disable() or set "
                "the attribute to False"
            )
        if type(module).__name__ == "CheckpointWrapper" or _is_composable(module):
            raise UsageError(
                f"{where} is checkpointed by torch.distributed already: leave that out, or do not "
                "apply a second one"
            )


def _flag_owners(model: nn.Module, block: str) -> list[nn.Module]:
    """The block and what it lies in, where they have the flag of Hugging Face's checkpointing.

    From 4.53 on it is the blocks that have it, before that it was the model around them.
    """
    return [
        module
        for name, module in model.named_modules()
        if f"{block}.".startswith(f"{name}." if name else "")
        and hasattr(module, "gradient_checkpointing")
    ]


def _is_composable(module: nn.Module) -> bool:
    """Whether torch.distributed's composable `checkpoint` stands on a module.

    Never where it was not imported, and it is not imported for the question.
    """
    # core alone imports torch.distributed.
    composable = sys.modules.get("torch.distributed._composable.checkpoint_activation")
    return composable is not None and composable.checkpoint.state(module) is not None
