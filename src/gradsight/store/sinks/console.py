"""One line per step on the terminal, at most one a second."""

import sys
import time

from gradsight.store.sinks.step_sink import SinkPlace, StepRow, StepSink
from gradsight.values.plain import listed

_FIRST = ("loss", "gradients/total_norm", "lr")
_SHORT = {"gradients/total_norm": "grad_norm"}


class ConsoleSink(StepSink):
    """Prints loss, gradient norm, learning rate, and parameters with a non-finite gradient."""

    def __init__(self, place: SinkPlace, every_seconds: float = 1.0) -> None:
        self._every = every_seconds
        self._last = -every_seconds

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """Take one number."""
        self.log_step(StepRow(step, {name: value}))

    def log_step(self, row: StepRow) -> None:
        """Print the step, unless a line was printed just now and nothing is wrong."""
        scalars = row.scalars
        bad = sorted({name.split("/")[1] for name in scalars if name.endswith(("/nan", "/inf"))})
        now = time.monotonic()
        shown = [name for name in _FIRST if name in scalars]
        if not bad and (not shown or now - self._last < self._every):
            return
        self._last = now
        parts = [f"{_SHORT.get(name, name)}={scalars[name]:.4g}" for name in shown]
        if bad:
            parts.append(f"not finite in {listed(bad, most=3)}")
        print(f"step {row.step}: {', '.join(parts)}", file=sys.stdout, flush=True)
