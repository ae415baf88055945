"""Rows by their own influence."""

from collections.abc import Sized

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradsight.errors import UsageError
from gradsight.ghost.selection.draws import AppealTable, spread_over
from gradsight.ghost.selection.row_sampler import RowSampler, SamplerOptions
from gradsight.values.whole_numbers import whole_number

Ints = npt.NDArray[np.int64]


class InfluenceSampler(RowSampler):
    """Draws the rows of a dataset with replacement, those more often that help the target.

        sampler = InfluenceSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for ids, batch in loader:
            with engine.observe(sample_ids=ids):
                loss_fn(model, batch).backward()
            sampler.update(engine.scores)

    A row's value is a running mean of its scores, each divided by their typical size in its look.
    No row is ever left out: one that hurt may come to help.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        num_samples: int | None = None,
        floor: float = 0.1,
        decay: float = 0.9,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Prepare to draw rows 0 to n - 1.

        data: the dataset, or anything that has its length, or the length itself.
        num_samples: how many rows an epoch draws, over all ranks; None: as many as there are.
        floor: the least weight of a row, above 0 and at most 1; the mean weight is 1.
        decay: what stays of a row's old value at a look; 0 believes the last look alone, and 1
            counts all looks alike.
        seed: of the order. Torch's generators are left alone.
        rank: this process among those that take turns; None: the process group's, if there is one.
        world_size: how many take turns; together with rank.
        """
        rows = _length(data)
        options = SamplerOptions(num_samples, floor, decay, seed, rank, world_size)
        super().__init__(rows, rows, options)
        self._appeal = AppealTable(rows)

    @property
    def weights(self) -> Tensor:
        """How often each row is drawn, against a plain shuffle: 1 on average, never below floor."""
        relative = self._appeal.all / self._appeal.mean
        return torch.from_numpy(self.floor + (1.0 - self.floor) * relative)

    def _entries_of(self, rows: Ints) -> Ints:
        return rows

    def _weigh(self, entries: Ints) -> None:
        self._appeal.set(entries, self._looks.appeal(entries))

    def _row_at(self, chance: float) -> int:
        # The floor is a share of all draws that goes to any row alike: nothing has to be weighed.
        if chance < self.floor:
            return spread_over(chance / self.floor, self.rows)
        return self._appeal.row_at((chance - self.floor) / (1.0 - self.floor))


def _length(data: object) -> int:
    """The number of rows."""
    if isinstance(data, Sized):
        try:
            return len(data)
        except TypeError as error:  # an iterable dataset, or a tensor of one number
            if not hasattr(data, "__index__"):
                raise UsageError(f"data must have a length: {error}") from error
    return whole_number(data, "data")
