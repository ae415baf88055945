"""Ranks that meet before they share anything: all of them come, or each is told who did not.

Making a process group and every exchange in it wait for all ranks, in the end for ever. A meeting
goes through the store of training's own group instead, where a rank can look who is there: nobody
waits longer than its patience, and all ranks hear the same word, whatever the order they come in.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from gradsight.errors import GradsightError

PATIENCE = 15.0
"""Seconds that ranks wait for each other where they open something together."""
_ALL = "all"
_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.05
"""Seconds between two looks at the store, which all ranks ask."""


_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""By purpose: how many places this process has come to."""


class RanksMissing(GradsightError):
    """Some ranks did not come to a meeting of all."""

    def __init__(self, met: "Meeting") -> None:
        self.met = met
        super().__init__(met.sentence())


@dataclass(frozen=True, slots=True)
class Meeting:
    """Who came in time, as every rank of the meeting was told it."""

    present: tuple[int, ...]
    size: int
    patience: float
    ended: bool = False
    """Whether it was ended early, because a rank had left for good."""

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that did not come in time."""
        return tuple(each for each in range(self.size) if each not in self.present)

    def sentence(self) -> str:
        """Who did not come, and how long the others waited.

        >>> Meeting((0,), 4, 15.0).sentence()
        'ranks 1, 2, 3 of 4 did not come within 15 s'
        """
        noun = "rank" if len(self.missing) == 1 else "ranks"
        names = ", ".join(map(str, self.missing[:8]))
        if len(self.missing) > 8:
            names += f" and {len(self.missing) - 8} more"
        if self.ended:
            return f"{noun} {names} of {self.size} did not come: the end had come on a rank"
        return f"{noun} {names} of {self.size} did not come within {self.patience:g} s"


class MeetingPlace:
    """Where the ranks of training's group meet, under names that they all know."""

    def __init__(self, purpose: str) -> None:
        """All who come for the same purpose, for the same time, come to the same place."""
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._prefix = f"gradsight/{purpose}/{next(_numbers[purpose])}"
        self._rank = dist.get_rank()
        self._size = dist.get_world_size()

    def leave_note(self, name: str, text: str) -> None:
        """Leave a text for the other ranks, without waiting for any of them."""
        self._store.set(f"{self._prefix}/{name}/{self._rank}", text)

    def notes(self, name: str) -> list[str] | None:
        """What all ranks have left under this name, in their order; None while one is missing."""
        keys = [f"{self._prefix}/{name}/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):
            return None
        return [self._store.get(key).decode() for key in keys]

    def meet(self, name: str, patience: float) -> Meeting:
        """Return when every rank has come, or when the first has lost its patience.

        Whoever comes after that is told so at once: it is not among those present. Nobody waits
        for a rank that has left the place for good.
        """
        key = f"{self._prefix}/{name}"
        left = f"{self._prefix}/left"
        word = f"{key}/word"
        self._store.set(f"{key}/{self._rank}", "")
        # The count spares a thousand ranks from asking for a thousand keys each.
        if self._store.add(f"{key}/count", 1) == self._size:
            self._say(word, _ALL)
        until = time.monotonic() + patience
        for pause in pauses():
            # Asked for, not waited for: a waiting client keeps other threads from the store.
            if self._store.check([word]):
                break
            ended = self._store.check([left])
            if ended or time.monotonic() > until:
                self._say(word, f"{int(ended)} {self._those_here(key)}")
                break
            time.sleep(pause)
        return self._told(self._store.get(word).decode(), patience)

    def leave(self) -> None:
        """Come to no further meeting here."""
        self._store.set(f"{self._prefix}/left", "")

    def somebody_left(self) -> bool:
        """Whether a rank comes to no further meeting here."""
        return bool(self._store.check([f"{self._prefix}/left"]))

    def forget(self, name: str) -> None:
        """Free what a meeting took of the store; for one rank, once all have heard its word."""
        key = f"{self._prefix}/{name}"
        for part in ("word", "count", *map(str, range(self._size))):
            self._store.delete_key(f"{key}/{part}")

    def _say(self, word: str, text: str) -> None:
        """The first to speak decides, so that all ranks go the same way."""
        self._store.compare_set(word, "", text)

    def _those_here(self, key: str) -> str:
        here = [each for each in range(self._size) if self._store.check([f"{key}/{each}"])]
        return ",".join(map(str, here))

    def _told(self, text: str, patience: float) -> Meeting:
        if text == _ALL:
            return Meeting(tuple(range(self._size)), self._size, patience)
        ended, present = text.split(" ")
        ranks = tuple(map(int, present.split(",")))
        return Meeting(ranks, self._size, patience, ended == "1")


def pauses() -> Iterator[float]:
    """How long to sleep between two looks: longer and longer, up to a limit."""
    pause = _SHORTEST_PAUSE
    while True:
        yield pause
        pause = min(_LONGEST_PAUSE, pause * 1.5)
