"""Which document each position belongs to, where a script says that its rows are packed."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core.calls import RecordedCall

_POSITIONS = frozenset({"position_ids", "positions", "position_indices", "pos_ids", "pos"})
_DOCUMENTS = frozenset(
    {
        "document_ids", "document_id", "documents", "doc_ids", "doc_id", "docs", "seq_idx",
        "sequence_ids", "sequence_id", "seq_ids", "segment_ids", "segments", "sample_ids",
    }
)  # fmt: skip


def named_arguments(module: nn.Module, call: RecordedCall) -> dict[str, Any]:
    """The arguments of a call by the names that the model gives them."""
    try:
        bound = inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    except (TypeError, ValueError):
        return {str(name): value for name, value in call.kwargs.items()}
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if isinstance(value, Mapping) and name not in call.kwargs:
            named.update({str(key): each for key, each in value.items()})
        else:
            named[name] = value
    return named


def documents_of(named: Mapping[str, Any], looked_up: Sequence[Tensor]) -> Tensor | None:
    """[rows, time]: the document of every position, -1 for none; None where nothing is packed."""
    mask = named.get("attention_mask")
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
            continue
        found: Tensor | None = None
        if name in _POSITIONS:
            found = _by_positions(value)
        elif name in _DOCUMENTS and not _is_looked_up(value, looked_up):
            found = value.long()
        elif name == "attention_mask" and int(value.max()) > 1:
            found = torch.where(value > 0, value, -1).long()
        if found is None:
            continue
        if isinstance(mask, Tensor) and mask.shape == found.shape and name != "attention_mask":
            found = torch.where(mask > 0, found, -1)
        if _has_several(found):
            return found
    return None


def is_positions(source: Tensor, named: Mapping[str, Any]) -> bool:
    """Whether these integers are the positions of a call, not its tokens."""
    given = [value for name, value in named.items() if name in _POSITIONS]
    return any(isinstance(each, Tensor) and _is_looked_up(source, [each]) for each in given)


def _by_positions(positions: Tensor) -> Tensor | None:
    """Numbered by the places where positions start again from 0."""
    steps = positions[:, 1:] - positions[:, :-1]
    restarts = positions[:, 1:] == 0
    # What goes another way than one by one, such as the rows of a picture, is no text.
    if not bool(((steps == 1) | restarts).all()):
        return None
    first = torch.zeros_like(positions[:, :1])
    return torch.cat([first, restarts.long().cumsum(1)], 1)


def _is_looked_up(value: Tensor, looked_up: Sequence[Tensor]) -> bool:
    """Whether it has an embedding of its own, as BERT's two segments have."""
    return any(value.shape == each.shape and torch.equal(value, each) for each in looked_up)


def _has_several(documents: Tensor) -> bool:
    return any(len([n for n in row.unique().tolist() if n >= 0]) > 1 for row in documents)
