"""Embeddings: a row of the table per index."""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gradsight.ghost.dots import row_dots
from gradsight.ghost.use import DECLINED, Use, rule


@rule(F.embedding)
def embedding(use: Use) -> Any:
    """y = W[index]: score_i = the sum over i's positions of <D[index], B>, without padding_idx."""
    index, weight = use.argument(0, "input"), use.argument(1, "weight")
    # max_norm rewrites rows of the table in the pass; scale_grad_by_freq divides by counts over the
    # whole batch, so that samples are mixed.
    if use.argument(3, "max_norm") is not None or use.argument(5, "scale_grad_by_freq", False):
        return DECLINED
    source, layout = use.source(weight), use.layout(index.shape)
    if source is None or layout is None:
        return DECLINED
    padding = use.argument(2, "padding_idx")
    if padding is not None and padding < 0:
        padding += weight.shape[0]
    batch = use.batch

    def score(grad: Tensor, saved: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        pairs = []
        for slot, direction in source.tangents():
            along = F.embedding(saved[0], direction)
            if padding is not None:
                # The row of padding_idx gets no gradient, though the direction has a part there.
                along.masked_fill_((saved[0] == padding).unsqueeze(-1), 0.0)
            pairs.append((slot, row_dots(along, grad, layout, batch)))
        return pairs

    return use.attach(use.plain(), score, [index])
