"""One line per step on the terminal, at most one a second."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from gradsight.values.plain import listed

_FIRST = ("loss", "gradients/total_norm", "lr")
_SHORT = {"gradients/total_norm": "grad_norm"}


class ConsoleSink:
    """Prints loss, gradient norm, learning rate, and parameters with a non-finite gradient."""

    def __init__(self, run_dir: Path | None = None, every_seconds: float = 1.0) -> None:
        self._every = every_seconds
        self._last = -every_seconds
        self._step = -1
        self._values: dict[str, float] = {}

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """Take one number."""
        self.log_scalars({name: value}, step)

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Take numbers of a step."""
        # Its line is printed when the next step comes: the loss is often logged last.
        if step != self._step:
            self.close()
            self._step = step
        self._values.update(values)

    def close(self) -> None:
        """Print the step at hand, unless a line was printed just now and nothing is wrong."""
        values = self._values
        self._values = {}
        bad = sorted({name.split("/")[1] for name in values if name.endswith(("/nan", "/inf"))})
        now = time.monotonic()
        shown = [name for name in _FIRST if name in values]
        if not bad and (not shown or now - self._last < self._every):
            return
        self._last = now
        parts = [f"{_SHORT.get(name, name)}={values[name]:.4g}" for name in shown]
        if bad:
            parts.append(f"not finite in {listed(bad, most=3)}")
        print(f"step {self._step}: {', '.join(parts)}", file=sys.stdout, flush=True)
