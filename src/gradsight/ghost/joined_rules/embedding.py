# mypy: allow-untyped-calls
"""Embeddings in one pass, alone or with a head that is tied to them.

A head comes first in the backward pass. It keeps its direction, one matrix, and of its output
gradients the columns of the validation tokens alone: no other entry of its gradient meets the
embedding's direction.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsight.ghost.dots import in_wide, row_dots, score_table
from gradsight.ghost.fallback import once_differentiable
from gradsight.ghost.one_pass import OnePass, Pairs
from gradsight.ghost.sample_axis import SampleLayout
from gradsight.ghost.tangent_sources import TangentSource
from gradsight.ghost.use import DECLINED, Use, joined_rule

PLAIN = SampleLayout()


@dataclass(slots=True)
class Lookup:
    """One embedding over joined rows."""

    one_pass: OnePass
    source: TangentSource
    layout: SampleLayout
    rows: int
    """Of the table."""
    padding: int
    """The index whose row gets no gradient; -1 for none."""


@dataclass(slots=True)
class Owed:
    """What a tied head keeps for its embedding."""

    inputs: Tensor
    """The head's inputs [B, T, d] of the training rows."""
    columns: list[Tensor]
    """By target, the training rows' output gradients [B, T, S] at its tokens."""
    directions: list[Tensor] = field(default_factory=list)
    """By target, the head's part of the direction."""


@dataclass(slots=True)
class TiedTable:
    """An embedding table that other operations use too, as far as this pass has come."""

    tokens: list[Tensor] | None
    """By target, the indices of its rows; None where the table is looked up more than once."""
    owed: Owed | None = None
    done: bool = False
    """Whether the embedding had its turn already."""


@joined_rule(F.embedding)
def joined_embedding(use: Use) -> Any:
    """y = W[index]: the direction is the validation rows' scatter, score_i its lookup dot B_i."""
    index, weight = use.argument(0, "input"), use.argument(1, "weight")
    if use.argument(3, "max_norm") is not None or use.argument(5, "scale_grad_by_freq", False):
        return DECLINED
    if use.argument(6, "sparse", False):
        return DECLINED
    source, layout = use.source(weight), use.layout(index.shape)
    if source is None or layout is None:
        return DECLINED
    padding = use.argument(2, "padding_idx")
    if padding is None:
        padding = -1
    elif padding < 0:
        padding += weight.shape[0]
    lookup = Lookup(use.one_pass, source, layout, weight.shape[0], padding)
    _note_tokens(lookup, index)
    return JoinedEmbedding.apply(index, weight, use.probe, lookup, *use.stand_ins(weight))


def _note_tokens(lookup: Lookup, index: Tensor) -> None:
    one_pass = lookup.one_pass
    (name,) = lookup.source.origins[:1]
    if name in one_pass.tables and not one_pass.in_recompute():
        one_pass.tables[name].tokens = None
        return
    rows = lookup.layout.rows(index, one_pass.parts.total)
    numbers = range(len(one_pass.targets))
    tokens = [one_pass.parts.of_target(rows, number).reshape(-1) for number in numbers]
    one_pass.tables.setdefault(name, TiedTable(tokens))


def owed_by_head(
    one_pass: OnePass, source: TangentSource, slopes: Tensor, inputs: Tensor
) -> Owed | None:
    """A linear layer's debt to the embedding that it is tied to; None where it is not of that kind.

    slopes and inputs: the output gradients [B, T, vocabulary] and inputs [B, T, d] of training.
    """
    name = source.origins[0]
    table = one_pass.tables.get(name)
    pair = one_pass.is_direct(source) and one_pass.uses[name] == 2
    if table is None or table.tokens is None or table.done or not pair:
        return None
    if sum(len(tokens) for tokens in table.tokens) >= slopes.shape[2]:
        return None
    columns = [slopes.index_select(2, tokens) for tokens in table.tokens]
    owed = Owed(inputs, columns)
    table.owed = owed
    return owed


class JoinedEmbedding(torch.autograd.Function):
    """Rows of a table, its gradient made of the training rows' alone."""

    @staticmethod
    def forward(
        ctx: Any, index: Tensor, weight: Tensor, probe: Tensor, lookup: Lookup, *stand_ins: Tensor
    ) -> Tensor:
        """The plain lookup."""
        ctx.save_for_backward(index)
        ctx.lookup = lookup
        ctx.probe = probe
        return F.embedding(index, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The table's gradient, the scores as the probe's, and the stand-ins' parts."""
        (index,) = ctx.saved_tensors
        lookup = ctx.lookup
        one_pass = lookup.one_pass
        parts = one_pass.parts
        total = parts.total
        ids = lookup.layout.rows(index, total).reshape(total, -1)
        slopes = in_wide(lookup.layout.rows(grad, total)).reshape(total, ids.shape[1], -1)
        training = parts.of_training(ids), parts.of_training(slopes)
        gradient = scattered(lookup, *training)
        stand_ins: list[Tensor | None] = [None] * len(one_pass.targets)
        pairs: Pairs = []
        table = one_pass.tables.get(lookup.source.origins[0])
        owed = None if table is None else table.owed
        if table is not None:
            table.done = True
        numbers = range(len(one_pass.targets))
        targets = [(parts.of_target(ids, n), parts.of_target(slopes, n)) for n in numbers]
        if owed is not None:
            pairs = settled(lookup, owed, training, targets)
            table.owed = None
        elif one_pass.is_single(lookup.source):
            directions = [scattered(lookup, *each) for each in targets]
            tangents = one_pass.tangents(lookup.source, directions)
            pairs = looked_up(lookup, *training, tangents)
        else:
            stand_ins = [scattered(lookup, *each) for each in targets]
            one_pass.wait(lookup.source.origins, partial(_later, lookup, *training))
        scores = score_table(pairs, ctx.probe) if pairs else None
        return None, gradient, scores, None, *stand_ins


def scattered(lookup: Lookup, ids: Tensor, slopes: Tensor) -> Tensor:
    """The table's gradient from some rows."""
    backward = torch.ops.aten.embedding_dense_backward
    made: Tensor = backward(slopes.contiguous(), ids, lookup.rows, lookup.padding, False)
    return made


def looked_up(lookup: Lookup, ids: Tensor, slopes: Tensor, tangents: Any) -> Pairs:
    """<D[index], B> of every training row, nothing at padding_idx."""
    pairs = []
    for slot, direction in tangents:
        rows = F.embedding(ids, direction)
        if lookup.padding >= 0:
            rows.masked_fill_((ids == lookup.padding).unsqueeze(-1), 0.0)
        pairs.append((slot, row_dots(rows, slopes, PLAIN, len(ids))))
    return pairs


def _later(lookup: Lookup, ids: Tensor, slopes: Tensor) -> Pairs:
    return looked_up(lookup, ids, slopes, lookup.source.tangents())


def settled(
    lookup: Lookup,
    owed: Owed,
    training: tuple[Tensor, Tensor],
    targets: list[tuple[Tensor, Tensor]],
) -> Pairs:
    """The embedding's scores along both parts of the direction, and what the head owes."""
    one_pass = lookup.one_pass
    name = lookup.source.origins[0]
    directions = []
    for head, each in zip(owed.directions, targets, strict=True):
        directions.append(head.add_(scattered(lookup, *each)))
    pairs = looked_up(lookup, *training, one_pass.tangents(lookup.source, directions))
    for number, (ids, slopes) in enumerate(targets):
        # D has the rows gv_s at the tokens s: <B_i^T A_i, D> sums B_i[t, s] <A_i[t], gv_s>.
        rows = slopes.reshape(-1, slopes.shape[-1])
        tokens = ids.reshape(-1)
        rows = one_pass.scaled_rows(name, rows, tokens)
        if lookup.padding >= 0:
            rows = rows.masked_fill((tokens == lookup.padding).unsqueeze(-1), 0.0)
        met = torch.matmul(in_wide(owed.inputs), rows.t().to(in_wide(owed.inputs).dtype))
        cross = met.mul_(owed.columns[number]).sum((1, 2))
        pairs.append((one_pass.directions.slot(number, name), cross))
    return pairs
