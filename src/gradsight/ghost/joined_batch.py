"""Training rows and the rows of every target as one batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

from gradsight.errors import UsageError
from gradsight.ghost.one_pass import OnePassRefusal
from gradsight.ghost.row_parts import RowParts

MASK = "attention_mask"
"""The entry of a batch by which a model leaves padding out."""
IGNORED_LABEL = -100


class JoinedBatch:
    """The rows of a training batch, followed by those of every target."""

    def __init__(self, batch: Any, targets: Mapping[str, Any]) -> None:
        """Rows are in dimension 0 of every tensor; what has none must be alike in all batches."""
        self.pads_training = False
        """Whether training rows were lengthened: their dropout would draw other numbers."""
        batches = [plain_containers(each) for each in (batch, *targets.values())]
        self._names = ["the training batch", *(f"target {name!r}" for name in targets)]
        self.parts = RowParts(*_sizes(batches, self._names))
        self.rows = self._join(batches)

    def _join(self, batches: Sequence[Any]) -> Any:
        flattened = [tree_flatten_with_path(each) for each in batches]
        spec = flattened[0][1]
        for (_, other), name in zip(flattened[1:], self._names[1:], strict=True):
            if other != spec:
                raise OnePassRefusal(
                    f"the data of {name} is built otherwise than the training batch ({other} "
                    f"against {spec}), so their rows cannot go through one pass."
                )
        columns = zip(*(leaves for leaves, _ in flattened), strict=True)
        masked = isinstance(batches[0], dict) and isinstance(batches[0].get(MASK), Tensor)
        return tree_unflatten([self._column(leaves, masked) for leaves in columns], spec)

    def _column(self, leaves: Sequence[tuple[Any, Any]], masked: bool) -> Any:
        """One entry of all batches."""
        values = [value for _, value in leaves]
        first = values[0]
        if not isinstance(first, Tensor):
            if any(value != first for value in values[1:]):
                raise OnePassRefusal(
                    f"batches hold different values ({first!r} and others), which one pass cannot "
                    "have both."
                )
            return first
        if not self._has_rows(values):
            if any(not torch.equal(value, first) for value in values[1:]):
                raise OnePassRefusal(
                    "the batches hold tensors of the shapes "
                    f"{[tuple(value.shape) for value in values]}, which are neither rows of "
                    "samples nor alike."
                )
            return first
        if masked:
            values = self._padded(values, str(leaves[0][0][-1]))
        for value, name in zip(values[1:], self._names[1:], strict=True):
            _refuse_other_rows(name, first if not masked else values[0], value)
        return torch.cat(values)

    def _has_rows(self, values: Sequence[Tensor]) -> bool:
        pairs = zip(values, self.parts.sizes, strict=True)
        return all(value.dim() > 0 and value.shape[0] == rows for value, rows in pairs)

    def _padded(self, values: Sequence[Tensor], key: str) -> list[Tensor]:
        """Rows of tokens at one length; the mask and ignored labels keep the padding out."""
        if any(value.dim() != 2 for value in values):
            return list(values)
        longest = max(value.shape[1] for value in values)
        filling = IGNORED_LABEL if "labels" in key else 0
        self.pads_training |= values[0].shape[1] < longest
        return [F.pad(value, (0, longest - value.shape[1]), value=filling) for value in values]


def plain_containers(batch: Any) -> Any:
    """Mappings that torch's trees do not open (Hugging Face's BatchEncoding) as dicts."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        return dict(batch)
    return batch


def row_count(batch: Any, name: str = "the training batch") -> int:
    """The rows of a batch: dimension 0 of its first tensor.

    >>> row_count({"x": torch.zeros(3, 2), "y": torch.zeros(3)})
    3
    """
    leaves, _ = tree_flatten_with_path(plain_containers(batch))
    tensors = [value for _, value in leaves if isinstance(value, Tensor) and value.dim() > 0]
    if not tensors:
        raise UsageError(
            f"{name} holds no tensor with rows of samples: expected a tensor, or a tuple, list or "
            f"dict of tensors with the samples in dimension 0, got {type(batch).__name__}"
        )
    return tensors[0].shape[0]


def _sizes(batches: Sequence[Any], names: Sequence[str]) -> tuple[int, tuple[int, ...]]:
    train, *targets = (row_count(each, name) for each, name in zip(batches, names, strict=True))
    return train, tuple(targets)


def _refuse_other_rows(name: str, train: Tensor, other: Tensor) -> None:
    if train.shape[1:] != other.shape[1:] or train.dtype != other.dtype:
        raise OnePassRefusal(
            f"rows of {name} are of shape {tuple(other.shape)} ({other.dtype}), those of the "
            f"training batch of shape {tuple(train.shape)} ({train.dtype}): rows of another length "
            "or type cannot go through one pass, but where the batches are dicts with an "
            f"{MASK}."
        )
