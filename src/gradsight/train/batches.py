"""The batches of every step, cut from one global order: the same samples whatever the number of
processes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradsight.errors import UsageError
from gradsight.train.samples import Order, Samples


@dataclass(frozen=True)
class Batch:
    """One process's micro-batch: inputs, targets, and where each row comes from."""

    inputs: Tensor
    targets: Tensor
    sample_ids: list[int]
    domains: list[str]

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """What the loss function takes."""
        return self.inputs, self.targets


def make_batch(
    samples: Samples, sample_ids: list[int], vocabulary: int, device: torch.device
) -> Batch:
    """The named samples as a batch."""
    blocks = np.stack([samples.tokens(sample_id) for sample_id in sample_ids])
    if blocks.max() >= vocabulary:
        raise UsageError(
            f"the data holds token {blocks.max()}, but the model knows tokens 0 to {vocabulary - 1}: "
            f"choose an --architecture with a larger vocabulary, or give --model.vocab_size"
        )
    tokens = torch.from_numpy(blocks).to(device)
    return Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        sample_ids,
        [samples.domain(sample_id) for sample_id in sample_ids],
    )


@dataclass(frozen=True)
class Batches:
    """Hands out micro-batches: of a step's global batch, first by micro-batch, then by process."""

    samples: Samples
    order: Order
    batch_size: int
    accumulation: int
    rank: int
    world: int
    vocabulary: int
    device: torch.device

    @property
    def per_step(self) -> int:
        """Samples of a step, over all processes and micro-batches."""
        return self.batch_size * self.accumulation * self.world

    def get(self, position: int, micro: int) -> Batch:
        """This process's part of a micro-batch, of the step that begins at a position in the stream
        of samples.
        """
        start = position + (micro * self.world + self.rank) * self.batch_size
        return make_batch(
            self.samples, self.order.take(start, self.batch_size), self.vocabulary, self.device
        )


def spread_evenly(count: int, wanted: int) -> list[int]:
    """`wanted` numbers below `count`, evenly spaced; all of them where there are no more."""
    return sorted({number * count // wanted for number in range(wanted)}) if count else []


def validation_pair(
    samples: Samples, wanted: int, rank: int, world: int, vocabulary: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """This process's rows of the validation batch; where they cannot be shared equally, every
    process takes them all.
    """
    rows = spread_evenly(len(samples), wanted)
    if not rows:
        raise UsageError(
            f"--method GradDotProd scores samples against validation data, and the val split has no block of "
            f"{samples.block_size + 1} tokens. Give more data, a smaller --block_size, or --method Regular"
        )
    if len(rows) < wanted:
        rows = (rows * wanted)[:wanted] if world > 1 else rows
    mine = rows[rank::world] if len(rows) % world == 0 else rows
    return make_batch(samples, mine, vocabulary, device).pair
