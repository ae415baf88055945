"""One small table of norms per rank, merged into the norms of whole gradients.

Where parameters are sharded every rank sees its own part. What it saw travels as an array [n, 5]
over all parameters: norm, largest magnitude, NaN, Inf, and whether there was a gradient at all.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gradsight.core.gradient_parts import gradient_parts
from gradsight.core.group import shared_group
from gradsight.core.held_parts import parts_left_out
from gradsight.core.shards import are_spread
from gradsight.measure.norms import NormReading, combine, recount, with_total
from gradsight.values.measured import Floats, Norms

_COLUMNS = 5


def rank_table(
    norms: Norms, rows: Sequence[int], size: int, left_out: Sequence[bool] | None = None
) -> Floats:
    """This rank's table; `rows` are the parameters that the norms are of.

    `left_out`: parameters of which another rank's replica is counted.
    """
    # Over all parameters, also those without a gradient here: every rank must send the same shape.
    table = np.zeros((size, _COLUMNS))
    table[rows, 0] = norms.l2
    table[rows, 1] = norms.max_abs
    if norms.counts is not None:
        table[rows, 2] = norms.counts[0]
        table[rows, 3] = norms.counts[1]
    table[rows, 4] = 1
    # A replicated parameter must not be summed over its replicas.
    if left_out is not None:
        table[left_out, :4] = 0
    return table


def merge_tables(tables: Floats) -> Floats:
    """Tables [ranks, n, 5] as one; a count that one rank does not know (-1) stays unknown."""
    counts = tables[:, :, 2:4]
    merged_counts = np.where((counts < 0).any(axis=0), -1.0, counts.sum(axis=0))
    largest = tables[:, :, 1:2].max(axis=0)
    seen = tables[:, :, 4:].max(axis=0)
    return np.concatenate([combine(tables[:, :, :1]), largest, merged_counts, seen], axis=1)


def norms_in(table: Floats) -> tuple[list[int], Norms]:
    """The parameters that have a gradient on some rank, and their norms."""
    rows = np.flatnonzero(table[:, 4])
    norms = with_total(table[rows, 0], table[rows, 1])
    if norms.counts is not None:
        counts = (table[rows, 2], table[rows, 3])
        norms = Norms(norms.l2, norms.max_abs, counts, norms.total, norms.wide)
    return rows.tolist(), norms


def norms_now(parameters: Sequence[Tensor]) -> Norms:
    """Norms of the whole gradients of these parameters, which all have one; waits for them.

    Where parameters are sharded, every rank must call it.
    """
    parts = gradient_parts(parameters)
    norms = recount(parts, NormReading(parts).read())
    group = shared_group() if are_spread(parameters) else None
    if group is None:
        return norms
    left_out = parts_left_out(group, parameters)
    table = rank_table(norms, range(len(parts)), len(parts), left_out)
    return norms_in(merge_tables(np.stack(group.start_gather(table).wait())))[1]
