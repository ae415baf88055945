"""The batches of every step, cut from one order: the same whatever the number of processes."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradsight.core.devices import sent_to
from gradsight.errors import UsageError
from gradsight.train.samples import Order, Samples


@dataclass(frozen=True, slots=True)
class Batch:
    """One process's micro-batch: inputs, targets, and where each row comes from."""

    inputs: Tensor
    targets: Tensor
    sample_ids: list[int]
    domains: list[str]
    weights: Tensor | None = None
    """How much each row counts in the loss; None: once each."""

    @property
    def for_loss(self) -> tuple[Tensor, ...]:
        """What the loss function takes."""
        if self.weights is None:
            return self.inputs, self.targets
        return self.inputs, self.targets, self.weights


@dataclass(frozen=True, slots=True)
class BatchStream:
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
        """This process's part of a micro-batch of the step that starts at a place in the order."""
        start = position + (micro * self.world + self.rank) * self.batch_size
        return self.make(self.samples, self.order.take(start, self.batch_size))

    def make(self, samples: Samples, sample_ids: list[int]) -> Batch:
        """The named samples of any split as a batch."""
        blocks = np.stack([samples.tokens(sample_id) for sample_id in sample_ids])
        if blocks.max() >= self.vocabulary:
            raise UsageError(
                f"the data holds token {blocks.max()}, but the model knows tokens 0 to "
                f"{self.vocabulary - 1}: choose an --architecture with a larger vocabulary, or "
                f"give --model.vocab_size"
            )
        tokens = sent_to(torch.from_numpy(blocks), self.device)
        domains = [samples.domain(sample_id) for sample_id in sample_ids]
        return Batch(tokens[:, :-1], tokens[:, 1:], sample_ids, domains)

    def validation(self, wanted: int, *, shared_out: bool) -> tuple[Tensor, ...]:
        """This process's rows of the validation batch that training samples are scored against.

        shared_out: each process has rows of its own, where they can be shared out; else all rows.
        """
        samples = self.samples.of("val")
        rows = spread_evenly(len(samples), wanted)
        if not rows:
            raise UsageError(
                f"--method GradDotProd scores samples against validation data, and the val split "
                f"has no block of {samples.block_size + 1} tokens. Give more data, a smaller "
                f"--block_size, or --method Regular"
            )
        if self.world > 1 and len(rows) < wanted:
            rows = (rows * wanted)[:wanted]
        # The target's gradient is a mean over processes, each counting the same: where rows
        # cannot be shared out equally, every process takes them all.
        if shared_out and len(rows) % self.world == 0:
            rows = rows[self.rank :: self.world]
        return self.make(samples, rows).for_loss


def spread_evenly(count: int, wanted: int) -> list[int]:
    """`wanted` numbers below `count`, evenly spaced; all of them where there are no more."""
    if not count:
        return []
    return sorted({number * count // wanted for number in range(wanted)})
