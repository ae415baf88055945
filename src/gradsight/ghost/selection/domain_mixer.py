"""Rows by the influence of their domains."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradsight.errors import UsageError
from gradsight.ghost.arguments import described
from gradsight.ghost.selection.draws import spread_over
from gradsight.ghost.selection.row_sampler import RowSampler, SamplerOptions

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class DomainMixer(RowSampler):
    """Draws the rows of a dataset with replacement, from those domains more that help the target.

        mixer = DomainMixer([page.source for page in dataset])
        loader = DataLoader(dataset, batch_size=32, sampler=mixer)

    Used and updated as an InfluenceSampler is. A domain's value is a running mean of its rows'
    scores; inside a domain all rows are alike.
    """

    def __init__(
        self,
        domains: Sequence[str],
        *,
        num_samples: int | None = None,
        floor: float = 0.1,
        decay: float = 0.9,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Prepare to draw rows 0 to n - 1.

        domains: the name of each row's domain.
        num_samples: how many rows an epoch draws, over all ranks; None: as many as there are.
        floor: the least share of a domain, above 0 and at most 1, as a part of its natural share.
        decay: what stays of a domain's old value at a look; 0 believes the last look alone, and 1
            counts all looks alike.
        seed: of the order. Torch's generators are left alone.
        rank: this process among those that take turns; None: the process group's, if there is one.
        world_size: how many take turns; together with rank.
        """
        names, domain_of = _domains(domains)
        self._domains = names
        self._domain_of = domain_of
        options = SamplerOptions(num_samples, floor, decay, seed, rank, world_size)
        super().__init__(len(self._domain_of), len(self._domains), options)
        sizes = np.bincount(self._domain_of, minlength=len(self._domains))
        self._rows_of = np.split(np.argsort(self._domain_of, kind="stable"), np.cumsum(sizes)[:-1])
        self._natural: Floats = sizes / self.rows
        self._shares: Floats = self._natural
        self._ends: Floats = np.cumsum(self._shares)

    @property
    def domain_weights(self) -> dict[str, float]:
        """The share of the draws that each domain gets; they sum to 1."""
        return dict(zip(self._domains, self._shares.tolist(), strict=True))

    @property
    def weights(self) -> Tensor:
        """How often each row is drawn, against a plain shuffle: 1 on average, never below floor."""
        return torch.from_numpy((self._shares / self._natural)[self._domain_of])

    @property
    def _names(self) -> tuple[str, ...]:
        return self._domains

    def _entries_of(self, rows: Ints) -> Ints:
        return self._domain_of[rows]

    def _weigh(self, entries: Ints) -> None:
        appeal = self._looks.appeal(slice(None))
        relative = appeal / (self._natural @ appeal)
        self._shares = self._natural * (self.floor + (1.0 - self.floor) * relative)
        self._ends = np.cumsum(self._shares)

    def _row_at(self, chance: float) -> int:
        last = len(self._ends) - 1
        domain = min(int(np.searchsorted(self._ends, chance, side="right")), last)
        # What the number has beyond the domain's beginning chooses the row in it.
        beyond = chance - (self._ends[domain] - self._shares[domain])
        rows = self._rows_of[domain]
        place = spread_over(max(0.0, float(beyond / self._shares[domain])), len(rows))
        return int(rows[place])


def _domains(given: object) -> tuple[tuple[str, ...], Ints]:
    """The names that occur, sorted, and the number of each row's name."""
    expected = "domains must be one name per row"
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__iter__"):
        raise UsageError(f"{expected}, got {described(given)}")
    names = list(given)
    for row, name in enumerate(names):
        if not isinstance(name, str):
            raise UsageError(f"{expected}; that of row {row} is {described(name)}")
    known = tuple(sorted({str(name) for name in names}))
    number = {name: place for place, name in enumerate(known)}
    return known, np.array([number[name] for name in names], dtype=np.int64)
