"""What a watch takes of the training itself: host seconds per step, and the bytes that it holds."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from threading import get_ident
from typing import Any

import numpy as np
import torch

from gradsight.core.guard import spent
from gradsight.core.shards import local_part
from gradsight.store.store import Store
from gradsight.values.findings import Finding
from gradsight.values.health_report import Abstention
from gradsight.values.measured import MeasuredStep
from gradsight.values.plain import plain
from gradsight.values.steps import Cost

_OURS = "gradsight."
_EVERY = 1000
"""Steps between two looks: one walks over everything that the watch holds."""
_EARLY = (10, 100)


class CostOutput:
    """Records what the watch costs; it is told of steps like whatever writes them."""

    title = "the cost of watching"

    def __init__(self, store: Store, watch: object, theirs: Iterable[torch.Tensor]) -> None:
        """`theirs` are the model's own tensors, which a watch refers to but does not hold."""
        self._store = store
        self._watch = watch
        self._theirs = {_storage(tensor) for tensor in theirs}
        self._thread = 0
        self._before = 0.0
        self._steps = 0
        self._held: int | None = None
        """Bytes, when they were last counted."""

    def write(self, measured: MeasuredStep, findings: Sequence[Finding]) -> None:
        """One more step."""
        if self._thread != get_ident():
            # Counted from its first step on: what came before is opening.
            self._thread = get_ident()
            self._before = spent.get(self._thread, 0.0)
            self._steps = 0
            return
        self._steps += 1
        if self._steps % _EVERY == 0 or self._steps in _EARLY:
            self._held = held_bytes(self._watch, self._theirs)
            self._record()

    def finish(self, findings: Sequence[Finding], abstained: Sequence[Abstention]) -> None:
        """The run is over."""
        if self._steps:
            self._record()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars cost next to nothing."""

    def log_scalar(self, step: int, name: str, value: float) -> None:
        """As above."""

    def log_tracked(self, step: int, name: str, value: float) -> None:
        """As above."""

    def _record(self) -> None:
        seconds = spent.get(self._thread, 0.0) - self._before
        # Counting them takes as long as the rest of closing: at the end the last count will do.
        held = held_bytes(self._watch, self._theirs) if self._held is None else self._held
        cost = Cost(seconds / self._steps, held, self._steps)
        self._store.add_record("cost", "watch", 0, plain(cost))


def held_bytes(root: object, theirs: Set[int] = frozenset()) -> int:
    """The bytes of all tensors, arrays and texts that an object of ours holds.

    What is the user's is not looked into: modules, optimizers, functions, and storages of theirs.
    """
    seen: set[int] = set()
    storages = set(theirs)
    total = 0
    waiting: deque[Any] = deque([root])
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            place = _storage(each)
            if place not in storages:
                storages.add(place)
                total += local_part(each).untyped_storage().nbytes()
        elif isinstance(each, np.ndarray):
            total += each.nbytes if each.base is None else 0
        elif isinstance(each, bytes | bytearray):
            total += len(each)
        else:
            waiting.extend(_parts(each))
    return total


def _storage(tensor: torch.Tensor) -> int:
    # A sharded tensor has no memory of its own: its part has.
    return int(local_part(tensor).untyped_storage()._cdata)


def _parts(holder: object) -> Iterator[object]:
    """What a container or an object of ours refers to."""
    if isinstance(holder, Mapping):
        yield from list(holder.values())
    elif isinstance(holder, list | tuple | set | frozenset | deque):
        yield from list(holder)
    elif type(holder).__module__.startswith(_OURS):
        yield from vars(holder).values() if hasattr(holder, "__dict__") else ()
        for kind in type(holder).__mro__:
            for name in getattr(kind, "__slots__", ()):
                yield getattr(holder, name, None)
