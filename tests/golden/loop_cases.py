"""The training loops of tests/session/loops.py: what the record says of every step."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import gradsight
from golden.results import Group
from session import loops

STEPS = 7
MORE_STEPS = {"thawed_later": 12, "scaler_skipping": 13, "scaler_fused_skipping": 13}
"""The layer is thawed at step 10; the last step that the scaler skips is 11."""

FLOAT32 = {
    # These loops call `expect` with a float64 copy and tell the two apart by the dtype.
    "another_model_between_micro_batches",
    "autocast",
    # The overflow that the scaler skips happens in float32 only.
    "scaler_skipping",
    "scaler_fused_skipping",
}
"""Loops that cannot be trained in float64. Float32 rounding differs between processors."""


class ShortCase(loops.Case):
    """A case with few steps, and without the comparison with plain autograd."""

    number: int = STEPS

    def steps(self) -> Iterator[list[loops.Batch]]:
        return itertools.islice(super().steps(), self.number)

    def expect(self, *args: Any, **options: Any) -> None:
        self.expected.append({})


def train(loop: Callable[[loops.Case], None]) -> dict[str, Any]:
    """Run a loop under a watch and return its record."""
    name = loop.__name__
    torch.set_default_dtype(torch.float32 if name in FLOAT32 else torch.float64)
    with tempfile.TemporaryDirectory() as run_dir:

        def watched(model: nn.Module, optimizers: Any) -> Any:
            return gradsight.watch(model, optimizers, run_dir=run_dir, quiet=True)

        case = ShortCase(watched)
        case.number = MORE_STEPS.get(name, STEPS)
        loop(case)
        return record(run_dir)


def record(run_dir: str) -> dict[str, Any]:
    """Return the steps of a run, [l2, max_abs] of every parameter, and the problems' keys."""
    run = gradsight.open_run(run_dir)
    fields = ("step", "total_norm", "clip_coef", "lr", "scale", "skipped", "gradient")
    steps = {
        step.step: {field: getattr(step, field) for field in fields} | {"parameters": {}}
        for step in run.steps()
    }
    for stat in run.parameter_stats():
        steps[stat.step]["parameters"][stat.parameter] = [stat.l2, stat.max_abs]
    problems = sorted(problem.key for problem in run.problems())
    return {"steps": list(steps.values()), "problems": problems}


LOOPS = [*loops.TRUTHFUL, *loops.CHANGED]
GROUP = Group(
    "loops",
    {loop.__name__: partial(train, loop) for loop in LOOPS},
    tolerance=1e-6,  # for norms that may be stored as float32 later
    tolerance_of={
        **dict.fromkeys(FLOAT32, 1e-5),
        "autocast": 0.02,  # bfloat16 has eight bits
    },
)
