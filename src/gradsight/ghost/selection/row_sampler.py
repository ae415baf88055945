"""What samplers by influence share: one order and all looks for all ranks, and a state."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Sampler

from gradsight.core import group
from gradsight.errors import UsageError
from gradsight.ghost.scores import Scores
from gradsight.ghost.selection.draws import Chances
from gradsight.ghost.selection.looks import InfluenceLooks
from gradsight.ghost.selection.rows_and_scores import gathered, of_scores, rows_and_scores
from gradsight.ghost.selection.sampler_state import SamplerState
from gradsight.values.whole_numbers import single_number, whole_number

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


_MOST_IN_FLIGHT = 1 << 16
"""Rows that a loader may have drawn ahead of training and that a state can keep."""


@dataclass(frozen=True)
class SamplerOptions:
    """What the user has asked for, as given."""

    num_samples: int | None
    floor: float
    decay: float
    seed: int
    rank: int | None
    world_size: int | None


class RowSampler(Sampler[int], ABC):
    """Draws rows with replacement, the more often the more they help.

    All ranks follow one order of places: rank r of w takes the places r, r + w, r + 2w and so on.
    A row is drawn when it is asked for, by the weights of that moment.
    """

    def __init__(self, rows: int, entries: int, options: SamplerOptions) -> None:
        """`entries`: how many things have a weight of their own."""
        if rows < 1:
            raise UsageError("there are no rows to draw from: data has the length 0")
        self.rows = rows
        self.num_samples = rows
        """Rows in an epoch, over all ranks."""
        if options.num_samples is not None:
            self.num_samples = whole_number(options.num_samples, "num_samples", least=1)
        self.floor = _share(options.floor, "floor")
        if self.floor == 0.0:
            raise UsageError(
                "floor must be above 0 and at most 1, got 0: a row that is never drawn could never "
                "show that it has come to help"
            )
        self._looks = InfluenceLooks(entries, _share(options.decay, "decay"))
        self._chances = Chances(whole_number(options.seed, "seed"))
        self._given = _given_rank(options.rank, options.world_size)
        self._epoch = 0
        self._place = 0
        self._drawn = 0
        """How many rows the current iteration has drawn."""
        self._last_drawn: deque[int] = deque(maxlen=_MOST_IN_FLIGHT)
        self._pending: list[int] = []
        """Rows that were drawn before the state was saved, and not used by then."""
        self._goes_on = True
        """Whether the next iteration begins at this place, and not with the next epoch."""
        self._iteration = object()

    @property
    def decay(self) -> float:
        """What stays of the old value at a look."""
        return self._looks.decay

    @property
    def seed(self) -> int:
        """Of the order."""
        return self._chances.seed

    @property
    def epoch(self) -> int:
        """The number of the epoch that is under way, or about to begin."""
        return self._epoch

    @property
    @abstractmethod
    def weights(self) -> Tensor:
        """How often each row is drawn, against a plain shuffle: 1 on average, never below floor."""

    @abstractmethod
    def _entries_of(self, rows: Ints) -> Ints:
        """What it is that these rows are looks at."""

    @abstractmethod
    def _weigh(self, entries: Ints) -> None:
        """Take over the new looks at some entries."""

    @abstractmethod
    def _row_at(self, chance: float) -> int:
        """The row that a random number from 0 to 1 stands for, by the present weights."""

    @property
    def _names(self) -> tuple[str, ...]:
        """What the entries are called, where they have names."""
        return ()

    # Rows.

    def __len__(self) -> int:
        """Rows that this rank gets in a whole epoch."""
        return -(-self.num_samples // self._turns()[1])

    def __iter__(self) -> Iterator[int]:
        if not self._goes_on or (self._place >= self.num_samples and not self._pending):
            self._epoch += 1
            self._place = 0
            self._pending = []
        self._goes_on = False
        self._drawn = 0
        self._last_drawn.clear()
        me = self._iteration = object()
        epoch, place = self._epoch, self._place
        rank, turns = self._turns()
        while self._pending and self._iteration is me:
            yield self._noted(self._pending.pop(0))
        while place < self.num_samples:
            row = self._row_at(self._chances.at(epoch, place + rank))
            place += turns
            # A loop that was left in the middle may be held by somebody who draws once more.
            if self._iteration is me:
                self._place = place
                self._noted(row)
            yield row

    def _noted(self, row: int) -> int:
        self._drawn += 1
        self._last_drawn.append(row)
        return row

    def _turns(self) -> tuple[int, int]:
        """This rank, and how many take turns."""
        # Asked for late: a sampler may be made before the processes have found each other.
        if self._given is not None:
            return self._given
        return group.rank(), group.world_size()

    # Scores.

    def update(
        self,
        sample_ids: Scores | Sequence[int | str] | Tensor | npt.NDArray[np.integer[Any]],
        scores: Sequence[float] | Tensor | npt.NDArray[np.floating[Any]] | None = None,
    ) -> None:
        """Take in one look: the rows of a batch and their scores, or `engine.scores`.

        sample_ids are numbers of rows; a score above 0 says that the row helps. Under a process
        group every rank calls it with its own rows, if only with none, and all share all looks.
        """
        fault: UsageError | None = None
        rows, values = np.zeros(0, np.int64), np.zeros(0)
        try:
            if isinstance(sample_ids, Scores):
                sample_ids, scores = of_scores(sample_ids, scores)
            rows, values = rows_and_scores(sample_ids, scores, self.rows)
        except UsageError as error:
            fault = error
        # Also with a fault: the other ranks would wait for this one.
        rows, values = gathered(rows, values, fault)
        self._weigh(self._looks.add(self._entries_of(rows), values))

    # State.

    def state_dict(self, used: int | None = None) -> dict[str, Any]:
        """Everything that the next iteration needs to go on here; plain numbers, texts and tensors.

        used: how many rows of this iteration training has used. A DataLoader with workers has drawn
        some more by then: with this number they come first when the state is loaded, and each rank
        keeps a state of its own. None: as many as were drawn, and the state is the same on all
        ranks.
        """
        pending: list[int] = []
        if used is not None:
            used = whole_number(used, "used")
            pending = self._in_flight(used)
        # The iteration under way may itself begin with rows of an earlier one.
        pending = [*pending, *self._pending]
        state = SamplerState(
            kind=type(self).__name__,
            rows=self.rows,
            names=self._names,
            seed=self.seed,
            floor=self.floor,
            decay=self.decay,
            epoch=self._epoch,
            place=self._place,
            pending=tuple(pending),
            turns=self._turns() if pending else (0, 1),
            sums=torch.from_numpy(self._looks.sums.copy()),
            counts=torch.from_numpy(self._looks.counts.copy()),
        )
        return state.to_dict()

    def _in_flight(self, used: int) -> list[int]:
        """The rows that were drawn in this iteration after the first so many."""
        known = len(self._last_drawn)
        first = self._drawn - known
        if not first <= used <= self._drawn:
            raise UsageError(
                f"used must be from {first} to {self._drawn}, the rows that this iteration has "
                f"drawn, got {used}"
            )
        return list(self._last_drawn)[used - first :]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state: the next iteration goes on where it was saved, in mid-epoch."""
        kept = SamplerState.from_dict(state)
        kept.refuse_other(type(self).__name__, self.rows, self._names)
        kept.refuse_other_rank(self._turns())
        self.floor = kept.floor
        self._looks = InfluenceLooks(len(kept.sums), kept.decay)
        self._looks.sums[:] = kept.sums.numpy()
        self._looks.counts[:] = kept.counts.numpy()
        self._chances = Chances(kept.seed)
        self._epoch = kept.epoch
        self._place = kept.place
        self._pending = list(kept.pending)
        self._drawn = 0
        self._last_drawn.clear()
        self._goes_on = True
        self._iteration = object()
        self._weigh(np.arange(len(kept.sums)))


def _share(given: object, name: str) -> float:
    """A number from 0 to 1."""
    value = math.nan if isinstance(given, bool) else single_number(given, name)
    if not 0.0 <= value <= 1.0:
        raise UsageError(f"{name} must be a number from 0 to 1, got {given!r}")
    return value


def _given_rank(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Rank and number of ranks, where the user has said which; both or none."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise UsageError(
            f"rank and world_size belong together: got rank={rank} and world_size={world_size}"
        )
    world_size = whole_number(world_size, "world_size", least=1)
    rank = whole_number(rank, "rank")
    if rank >= world_size:
        raise UsageError(f"rank must be below world_size, got rank {rank} of {world_size}")
    return rank, world_size
