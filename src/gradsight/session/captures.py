"""Graphs that are captured while a run is watched: left alone, and what they hide is said.

While a graph is captured nothing may wait, ask an event or ask for pinned memory: that would break
the capture. Its replays call no backward and no hook. A step whose optimizer is called outside of
the graph is looked at there; of one that is in the graph as a whole nothing can be seen.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradsight.core.devices import accelerators, is_anything_capturing
from gradsight.core.guard import Guard, pauses
from gradsight.core.problems import Problems

CAPTURED_STEP = (
    "the optimizer's step was captured in a graph: its replays call no hook, so nothing of them "
    "can be seen and none is recorded. Capture forward and backward alone and call "
    "optimizer.step() outside of the graph; every step is recorded then."
)


class Captures:
    """Closes the border while a graph is captured on an accelerator of these parameters."""

    def __init__(
        self, parameters: Sequence[Tensor], optimizers: Sequence[Optimizer], problems: Problems
    ) -> None:
        self._is_needed = bool(accelerators(parameters))
        self._optimizers = optimizers
        self._problems = problems
        self.hides_steps = False
        """Whether a whole step was captured, and that was said."""
        self.guard = Guard(problems, "captures", "captures are no longer noticed")

    def start(self) -> None:
        """Begin to ask; where there is no accelerator, nothing is asked."""
        if not self._is_needed:
            return
        # Every watch asks the same: whichever goes first takes one question away.
        pauses.append(is_anything_capturing)
        self.guard.at_end(pauses.pop)
        for optimizer in self._optimizers:
            # Attempted, not run: it is while the border is closed that this has to be noticed.
            notice = partial(self.guard.attempt, self._about_to_step)
            self.guard.at_end(optimizer.register_step_pre_hook(notice).remove)

    def _about_to_step(self, *_: Any) -> None:
        if is_anything_capturing():
            self.hides_steps = True
            self._problems.report("captured-step", CAPTURED_STEP)
