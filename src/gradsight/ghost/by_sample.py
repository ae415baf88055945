"""Score samples with one backward pass each.

This is the slow, exact way. It is used when the rows of each sample cannot be located in the
tensors that meet parameters. The gradient of the loss at the model's outputs is split by sample,
and each part is sent back through the graph that training has built, so dropout and routing stay
the same. Nothing is known of any layer. The graph can still be used afterwards.

To find each sample's part of an output, every sample is run alone in evaluation mode. That also
proves that the samples do not influence each other.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from gradsight.core.beside import beside_training, eager
from gradsight.core.samples import (
    NotSeparable,
    SplitCall,
    collecting_loss_inputs,
    parts_by_sample,
    tensors_in,
)
from gradsight.errors import GradsightError, in_one_line
from gradsight.ghost.directions import Directions
from gradsight.ghost.gradients import dot, gradients
from gradsight.ghost.parameters import ScoredParameters

Parts = list[tuple[slice, ...]]
"""Where each sample is in a tensor."""
ALIKE = 0.1
"""Fraction of the usual tolerance for a sample alone and in the batch: samples look alike early in
training, and must not be taken for each other.
"""
CUT_TOLERANCE = 1e-5
"""Relative tolerance of the check that the outputs carry the whole gradient."""


@dataclass(frozen=True, slots=True)
class TrainingPass:
    """A training pass that is about to go backward."""

    calls: Sequence[SplitCall]
    seen: Sequence[Tensor]
    """The model's outputs, then what loss functions were given inside of it."""
    losses: Sequence[Tensor]
    """What backward is called on."""
    seeds: Sequence[Tensor] | None
    """The gradients that it was given for these; None for 1."""


def scores_by_sample(
    training: TrainingPass,
    parameters: ScoredParameters,
    directions: Directions,
    within: float,
    unseen: AbstractContextManager[None],
) -> Tensor | None:
    """Return the scores [slots, B], or None if the loss does not depend on the model.

    unseen: a context in which the tracer is paused.
    """
    whole = _pull(training.losses, training.seeds, parameters)
    if not whole:
        return None
    with unseen:
        parts, reasons = _parts(parameters.root, training, within)
    batch = training.calls[0].batch
    table = torch.zeros(
        directions.slots, batch, device=parameters.device, dtype=parameters.score_dtype
    )
    for chosen in _cuts(training.seen, parts):
        tensors = [training.seen[i] for i in chosen]
        slopes = torch.autograd.grad(
            training.losses, tensors, training.seeds, retain_graph=True, allow_unused=True
        )
        cotangents = [
            torch.zeros_like(y) if slope is None else slope
            for y, slope in zip(tensors, slopes, strict=True)
        ]
        if not _same(_pull(tensors, cotangents, parameters), whole):
            continue
        for sample in range(batch):
            own = [
                _only(cotangent, parts[i][sample])
                for i, cotangent in zip(chosen, cotangents, strict=True)
            ]
            for name, gradient in _pull(tensors, own, parameters).items():
                for slot, direction in directions.tangents(name):
                    table[slot, sample] += dot(direction, gradient).to(table)
        return table
    if reasons:
        raise NotSeparable(
            f"the samples of this batch cannot be scored: {reasons[0]}. Let the model return one "
            "row for each sample, or train without GhostEngine."
        )
    raise GradsightError(
        f"a part of the gradient does not come through the outputs of "
        f"{type(parameters.root).__name__}, so it belongs to no sample: the loss has a "
        "regulariser, or uses tensors that the model does not return. Use the optimizer's weight "
        "decay instead of a regulariser, or return these tensors from the model."
    )


def _pull(
    tensors: Sequence[Tensor], cotangents: Sequence[Tensor] | None, parameters: ScoredParameters
) -> dict[str, Tensor]:
    if not any(tensor.requires_grad for tensor in tensors):
        return {}
    return gradients(tensors, cotangents, parameters.trainable, sharded=False, keep_graph=True)[0]


def _parts(
    root: nn.Module, training: TrainingPass, within: float
) -> tuple[dict[int, Parts], list[str]]:
    """Locate the samples in each output; also return why that failed for others."""
    batch = training.calls[0].batch
    if within < 1e-2:  # in 16 bits rounding is as large as that
        within *= ALIKE
    with beside_training(root, evaluating=True), eager(), torch.no_grad():
        whole = _outputs(root, training.calls, None)
        try:
            alone = [_outputs(root, training.calls, sample) for sample in range(batch)]
        except (GradsightError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise NotSeparable(
                f"the samples of this batch cannot be scored: {type(root).__name__} fails on one "
                f"sample alone ({in_one_line(error)}). {_undivided(training.calls)}Give the model "
                "tensors with the samples in dimension 0, or train without GhostEngine."
            ) from error
    reasons: list[str] = []
    parts = {}
    for number, y in enumerate(training.seen):
        if not _has_rows(y):
            continue
        try:
            own = [each[number] for each in alone]
            if whole[number].shape != y.shape:
                raise NotSeparable(
                    f"an output has shape {tuple(y.shape)} in training and "
                    f"{tuple(whole[number].shape)} in evaluation mode"
                )
            parts[number] = parts_by_sample(whole[number], own, within)
        except IndexError:
            reasons.append("the model returns fewer tensors for one sample, or in evaluation mode")
        except NotSeparable as error:
            reasons.append(str(error))
    if not parts and not reasons:
        reasons.append("no output of the model has a sample dimension")
    return parts, reasons


def _undivided(calls: Sequence[SplitCall]) -> str:
    """List the arguments that could not be split by sample, for an error message."""
    found = []
    for call in calls:
        args, kwargs = call.whole()
        leaves, _ = tree_flatten_with_path((args, kwargs))
        for number, (path, value) in enumerate(leaves):
            if isinstance(value, Tensor) and number not in call.dims:
                name = keystr(path[1:]) if path[:1] else keystr(path)
                found.append(f"{name} of shape {tuple(value.shape)}")
    if not found:
        return ""
    more = "" if len(found) <= 3 else f" and {len(found) - 3} more"
    return f"These arguments have no sample dimension: {', '.join(found[:3])}{more}. "


def _outputs(root: nn.Module, calls: Sequence[SplitCall], sample: int | None) -> list[Tensor]:
    inside: list[Tensor] = []
    found: list[Tensor] = []
    with collecting_loss_inputs(inside):
        for call in calls:
            args, kwargs = call.whole() if sample is None else call.row(sample)
            found += tensors_in(root(*args, **kwargs))
    return [*found, *inside]


def _cuts(seen: Sequence[Tensor], parts: dict[int, Parts]) -> Iterator[list[int]]:
    """Outputs that may carry the whole gradient: each alone, then all."""
    for number in parts:
        yield [number]
    if len(parts) > 1:
        yield list(parts)


def _has_rows(y: Any) -> bool:
    return (
        isinstance(y, Tensor)
        and (y.is_floating_point() or y.is_complex())
        and y.requires_grad
        and y.dim() > 0
    )


def _only(cotangent: Tensor, part: tuple[slice, ...]) -> Tensor:
    own = torch.zeros_like(cotangent)
    own[part] = cotangent[part]
    return own


def _same(found: dict[str, Tensor], whole: dict[str, Tensor]) -> bool:
    if found.keys() != whole.keys():
        return False
    size = sum(float(dot(g, g)) for g in whole.values())
    off = sum(float(dot(found[n] - g, found[n] - g)) for n, g in whole.items())
    return off <= CUT_TOLERANCE**2 * size
