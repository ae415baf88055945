"""What a watch takes of the training itself: host seconds per step."""

from collections.abc import Mapping, Sequence
from threading import get_ident

from gradsight.core.guard import spent
from gradsight.store.store import Store
from gradsight.values.findings import Finding
from gradsight.values.health_report import Abstention
from gradsight.values.measured import MeasuredStep
from gradsight.values.plain import plain
from gradsight.values.steps import Cost

_EVERY = 1000
"""Steps between two records of the cost."""
_EARLY = (10, 100)


class CostOutput:
    """Records what the watch costs; it is told of steps like whatever writes them."""

    title = "the cost of watching"

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = 0
        self._before = 0.0
        self._steps = 0

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
        cost = Cost(seconds / self._steps, self._steps)
        self._store.add_record("cost", "watch", 0, plain(cost))
