"""Blocks that only a step shows: modules that one forward pass calls again and again."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gradsight.core.parameters import unwrapped
from gradsight.errors import GradsightError
from gradsight.memory.blocks import NoBlocks, can_be_block, find_blocks, outermost
from gradsight.memory.fake import data_dependence_refused, fake_tensors, fake_twin, is_faking
from gradsight.memory.leftovers import without_leftovers
from gradsight.memory.workload import Workload, as_workload


def blocks_of(workload: Workload, blocks: Sequence[str] | None) -> Sequence[str] | None:
    """The blocks as they were named; None where the model's structure shows them.

    Where it shows none, the names of those that a step calls more than once.
    """
    if blocks is not None:
        return blocks
    try:
        find_blocks(workload.model)
    except NoBlocks:
        called = called_blocks(workload)
        if not called:
            raise
        return called
    return None


def called_blocks(workload: Workload) -> list[str]:
    """Names of the outermost modules with parts that one forward pass calls more than once."""
    if is_faking():
        return _called_more_than_once(workload)
    with suppress(GradsightError):  # a model that needs real data shows nothing
        return _called_in_a_fake_pass(workload)
    return []


@without_leftovers
def _called_in_a_fake_pass(workload: Workload) -> list[str]:
    with fake_tensors(), data_dependence_refused():
        twin = fake_twin((workload.model, workload.batch, workload.loss_fn))
        return _called_more_than_once(as_workload(twin))


def _called_more_than_once(workload: Workload) -> list[str]:
    calls: Counter[int] = Counter()

    def count(module: nn.Module, args: Any) -> None:
        calls[id(module)] += 1

    handle = register_module_forward_pre_hook(count)
    try:
        workload.loss()
    finally:
        handle.remove()
    repeated = [
        (name, module)
        for name, module in unwrapped(workload.model).named_modules()
        if name and calls[id(module)] > 1 and can_be_block(module)
    ]
    return [name for name, _ in outermost(repeated)]
