"""Gradients as their parameters lie on the ranks.

A gradient may lie otherwise than its parameter: after a layer whose activations are divided among
the ranks (sequence parallelism) every rank has a summand of it (Partial), and torch adds them up
when the optimizer steps.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsight.core.group import shared_group
from gradsight.core.shards import is_sharded, local_part, sharding
from gradsight.errors import GradsightError


def lies_like_its_parameter(parameter: Tensor) -> bool:
    """Whether the parts of the gradient are those of the parameter."""
    return parameter.grad is None or sharding(parameter.grad) == sharding(parameter)


def gradient_parts(parameters: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of every gradient, cut as its parameter is; empty where there is none.

    Summands are added up over the ranks, on a group of our own. So whoever calls it where there may
    be some has to call it on all ranks, with the same parameters.
    """
    parts = [_part(parameter.grad) for parameter in parameters]
    otherwise = [
        row for row, parameter in enumerate(parameters) if not lies_like_its_parameter(parameter)
    ]
    by_mesh: dict[Any, list[int]] = {}
    for row in otherwise:
        by_mesh.setdefault(_key(parameters[row].grad), []).append(row)
    for rows in by_mesh.values():
        gradients: list[Any] = [parameters[row].grad for row in rows]
        for row, summed in zip(rows, _summed(gradients), strict=True):
            parts[row] = _cut_like(parameters[row], summed, parameters[row].grad)
    return parts


def _part(gradient: Tensor | None) -> Tensor:
    return torch.empty(0, device="cpu") if gradient is None else local_part(gradient)


def _key(gradient: Any) -> object:
    """Gradients that are added up together: by the same ranks, in the same type."""
    return (gradient.device_mesh, gradient.placements, gradient.dtype)


def _summed(gradients: Sequence[Any]) -> list[Tensor]:
    """Local parts without summands; all gradients lie alike."""
    mesh = gradients[0].device_mesh
    parts = [local_part(gradient) for gradient in gradients]
    for axis, placement in enumerate(gradients[0].placements):
        if not placement.is_partial():
            continue
        if placement.reduce_op not in ("sum", "avg"):
            raise GradsightError(
                f"a gradient has the placement {placement}: it is neither the sum nor the mean of "
                "what the ranks hold, so no statistic of it would be true"
            )
        flat = torch.cat([part.reshape(-1) for part in parts])
        flat = shared_group(_ranks_along(mesh, axis), flat.device).sum(flat)
        if placement.reduce_op == "avg":
            flat = flat / mesh.size(axis)
        cuts = torch.split(flat, [part.numel() for part in parts])
        parts = [cut.view_as(part) for cut, part in zip(cuts, parts, strict=True)]
    return parts


def _ranks_along(mesh: Any, axis: int) -> tuple[int, ...]:
    """The ranks that stand beside this one on an axis of a mesh."""
    where = mesh.get_coordinate()
    line = mesh.mesh.movedim(axis, -1)
    for position in (*where[:axis], *where[axis + 1 :]):
        line = line[position]
    return tuple(line.tolist())


def _cut_like(parameter: Any, part: Tensor, gradient: Any) -> Tensor:
    """What a parameter's own placements leave of a gradient's part; nothing is sent for it."""
    if not is_sharded(parameter) or parameter.device_mesh != gradient.device_mesh:
        raise GradsightError(
            f"a gradient lies on the mesh {gradient.device_mesh} and its parameter on "
            f"{getattr(parameter, 'device_mesh', None)}: their parts cannot be compared"
        )
    from torch.distributed.tensor import DTensor, Replicate

    placements = [
        Replicate() if placement.is_partial() else placement for placement in gradient.placements
    ]
    for mine, wanted in zip(placements, parameter.placements, strict=True):
        if mine != wanted and not mine.is_replicate():
            raise GradsightError(
                f"a gradient has the placements {gradient.placements} and its parameter "
                f"{parameter.placements}: putting it together would send all of it"
            )
    whole = DTensor.from_local(part, gradient.device_mesh, placements, run_check=False)
    return local_part(whole.redistribute(placements=parameter.placements))
