"""Where rows and positions are in what a model gives."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradsight.first_step.operations import SeenTargets


def by_position(output: Tensor, rows: int, length: int, time_first: bool) -> list[Tensor]:
    """An output as [rows, time, ...], in every way that its shape can be read; the likeliest first.

    The last positions may be missing: those that have no target.
    """
    if output.dim() < 2:
        return []
    shape = tuple(output.shape)
    found = []
    if shape[:2] == (rows, length):
        found.append(output)
    if shape[:2] == (length, rows):
        found.append(output.transpose(0, 1))
    if time_first:
        found.reverse()
    # Classes may be second, as losses take them.
    if len(shape) == 3 and (shape[0], shape[2]) == (rows, length):
        found.append(output.movedim(1, -1))
    if len(shape) == 3 and (shape[0], shape[2]) == (length, rows):
        found.append(output.movedim(1, -1).transpose(0, 1))
    if found:
        return found
    if shape[0] == rows * length and time_first:
        return [output.reshape(length, rows, *shape[1:]).transpose(0, 1)]
    if shape[0] == rows * length:
        return [output.reshape(rows, length, *shape[1:])]
    cut = None if time_first else _cut_short(output, rows, length)
    return [] if cut is None else [cut]


def _cut_short(output: Tensor, rows: int, length: int) -> Tensor | None:
    for missing in (1, 2):
        if output.shape[0] == rows and output.shape[1] == length - missing:
            return output
        if output.shape[0] == rows * (length - missing) and length > missing:
            return output.reshape(rows, length - missing, *output.shape[1:])
    return None


def by_row(output: Tensor, rows: int, targets: Sequence[SeenTargets]) -> Tensor | None:
    """An output as [rows, ...]; None where it is none, or compares rows with each other."""
    if output.dim() < 1 or output.shape[0] != rows:
        return None
    # Similarities of all rows with all: contrastive models give them on purpose.
    others = {rows, rows - 1, 2 * rows, 2 * rows - 1, 2 * rows - 2}
    may_compare = output.dim() >= 2 and bool(others & set(output.shape[1:]))
    if may_compare and not any(_are_classes(each.values, rows) for each in targets):
        return None
    return output.reshape(rows, -1)


def _are_classes(values: Tensor, rows: int) -> bool:
    """Whether these are classes of rows; the right one of other rows is another for each."""
    is_one_each = values.dim() == 1 and len(values) == rows and not values.is_floating_point()
    return is_one_each and len(set(values.tolist())) < rows


def sure_rows(
    root: nn.Module, inputs: Sequence[Tensor], targets: Sequence[SeenTargets]
) -> int | None:
    """The number of rows where the first dimension is certainly theirs; None where it may not be.

    A sequence without a batch, time before rows, a graph of nodes: all have a first dimension whose
    entries see each other on purpose.
    """
    if not inputs:
        return None
    first = inputs[0]
    rows = first.shape[0] if first.dim() >= 2 else 0
    if rows < 2 or first.shape[1] == rows or is_graph(root, inputs):
        return None
    may_be_time = any(getattr(module, "batch_first", True) is False for module in root.modules())
    for each in targets:
        shape = tuple(each.values.shape)
        if not shape or shape[0] != rows:
            continue
        is_label_per_row = math.prod(shape) == rows
        if is_label_per_row and (first.dim() > 2 or not first.is_floating_point()):
            return rows
        if first.dim() >= 4 or not may_be_time:
            return rows
    return None


def is_graph(root: nn.Module, inputs: Sequence[Tensor]) -> bool:
    """Whether the rows may be nodes: something says which of them are neighbours."""
    if not inputs or not inputs[0].dim():
        return False
    rows = inputs[0].shape[0]
    held = [value for module in root.modules() for value in vars(module).values()]
    held += list(root.buffers())
    held = [each for each in held if isinstance(each, Tensor)]
    if any(each.layout is not torch.strided for each in (*inputs, *held)):
        return True
    first, *others = inputs
    is_square = first.dim() == 2 and first.shape[1] == rows and first.is_floating_point()
    if is_square and any(each.shape[:1] == (rows,) for each in others if each.dim() > 1):
        return True
    for each in (*others, *held):
        if each.dim() >= 2 and list(each.shape).count(rows) >= 2 and not each.requires_grad:
            return True
        if each.dim() == 2 and each.shape[0] == 2 and not each.is_floating_point():
            return True
    return False
