"""A look as the user hands it in, checked; and the looks of all ranks as one."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gradsight.core.group import shared_group, world_size
from gradsight.errors import UsageError
from gradsight.ghost.arguments import checked_ids, described
from gradsight.ghost.scores import Scores

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FAULT = -1.0
"""What a rank tells the others instead of its number of rows."""


def of_scores(scores: Scores, beside: object) -> tuple[list[int | str], Tensor]:
    """The ids and scores of a block; it must have one target."""
    if beside is not None:
        raise UsageError("update() takes engine.scores, or ids and scores, not both")
    if len(scores.by_target) != 1:
        names = ", ".join(scores.by_target)
        raise UsageError(
            f"update() follows one target, and these scores have {len(scores.by_target)} "
            f"({names}): give update(scores.sample_ids, scores.by_target[name])"
        )
    return scores.sample_ids, scores.total


def rows_and_scores(ids: object, scores: object, rows: int) -> tuple[Ints, Floats]:
    """Rows and their scores as arrays of one length."""
    if scores is None:
        raise UsageError("update() needs the scores too: update(sample_ids, scores)")
    known = checked_ids(ids)
    for each in known:
        if isinstance(each, str) or not 0 <= each < rows:
            raise UsageError(
                f"there is no row {each!r}: sample_ids are numbers of rows, 0 to {rows - 1}"
            )
    values = _floats(scores)
    if len(values) != len(known):
        raise UsageError(
            f"update() takes one score per row, got {len(values)} scores for {len(known)} rows"
        )
    return np.array(known, dtype=np.int64), values


def _floats(scores: Any) -> Floats:
    """Scores of torch, of numpy or of Python as one line of numbers."""
    if isinstance(scores, Tensor):
        scores = scores.detach().double().cpu().numpy()
    elif isinstance(scores, Iterable):
        scores = [each.item() if isinstance(each, Tensor) else each for each in scores]
    try:
        values = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"scores must be numbers, got {described(scores)}") from error
    if values.ndim != 1:
        raise UsageError(f"scores must be one number per row, got the shape {values.shape}")
    return values


def gathered(rows: Ints, scores: Floats, fault: UsageError | None) -> tuple[Ints, Floats]:
    """The rows and scores of all ranks, in the order of ranks; a rank's fault is raised on all."""
    if world_size() == 1:
        if fault is not None:
            raise fault
        return rows, scores
    group = shared_group()
    mine = np.array([_FAULT if fault is not None else len(rows)], dtype=np.float64)
    counts = [float(each[0]) for each in group.start_gather(mine).wait()]
    if fault is not None:
        raise fault
    if _FAULT in counts:
        where = counts.index(_FAULT)
        raise UsageError(f"rank {where} was given scores that it refuses; its own message says why")
    # One message needs equal parts: all are padded to the longest.
    longest = int(max(counts))
    padded = np.zeros((2, longest))
    padded[0, : len(rows)] = rows
    padded[1, : len(rows)] = scores
    parts = group.start_gather(padded).wait()
    cut = [part[:, : int(count)] for part, count in zip(parts, counts, strict=True)]
    together = np.concatenate(cut, axis=1)
    return together[0].astype(np.int64), together[1]
