"""Lines over the steps as the page takes them: minimum and maximum by column. No torch."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsight.show.page.encode import packed_floats, packed_numbers
from gradsight.show.page.pyramid import grid_factor
from gradsight.values.steps import Step

_MOST_POINTS = 1024
_MOST_MARKS = 1000
LINES = ("loss", "lr", "total_norm", "scale")


def run_lines(steps: Sequence[Step]) -> dict[str, Any]:
    """What is known of every step, by name; a line that was never recorded is missing."""
    lines: dict[str, Any] = {}
    for name in LINES:
        known = [step for step in steps if getattr(step, name) is not None]
        if known:
            numbers = np.array([step.step for step in known], dtype=np.int64)
            values = np.array([getattr(step, name) for step in known], dtype=np.float64)
            lines[name] = line(numbers, values)
    lines["skipped"] = skipped_steps(steps)
    lines["clipping"] = clipping(steps)
    return lines


def line(steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> dict[str, Any]:
    """A line thinned to a screen's points: the lowest and the highest finite value of each."""
    factor = grid_factor(len(steps), _MOST_POINTS)
    edges = np.arange(0, len(steps), factor)
    ends = np.append(edges[1:], len(steps))
    finite = np.isfinite(values)
    known = np.where(finite, values, np.nan)
    result = {
        "count": len(edges),
        "factor": factor,
        "starts": packed_numbers(steps[edges]),
        "lasts": packed_numbers(steps[ends - 1]),
        "high": packed_floats(np.fmax.reduceat(known, edges)),
        "first": number(values[0]),
        "last": number(values[-1]),
        "bad": [steps[place].item() for place in np.flatnonzero(~finite)[:_MOST_MARKS]],
        "bad_count": int((~finite).sum()),
    }
    if factor > 1:
        result["low"] = packed_floats(np.fmin.reduceat(known, edges))
    return result


def number(value: float) -> float | str:
    """A number as JSON has it: what is not finite is the text "nan", "inf" or "-inf"."""
    value = float(value)
    return value if np.isfinite(value) else str(value)


def skipped_steps(steps: Sequence[Step]) -> dict[str, Any]:
    """How many steps a GradScaler left out, and the first of them."""
    skipped = [step.step for step in steps if step.skipped]
    return {"count": len(skipped), "steps": skipped[:_MOST_MARKS]}


def clipping(steps: Sequence[Step]) -> dict[str, Any]:
    """How often the gradient was clipped, and to which norm; None where that is not one number."""
    clipped = [step for step in steps if step.clip_coef is not None and step.clip_coef < 1]
    norms = [
        step.total_norm * step.clip_coef
        for step in clipped
        if step.total_norm is not None and step.clip_coef is not None
    ]
    finite = [norm for norm in norms if np.isfinite(norm)]
    limit = None
    if finite:
        middle = median(finite)
        # A norm that is clipped to is the same on every step; by value or by parameter it is not.
        near = sum(abs(norm - middle) <= 0.02 * middle for norm in finite)
        limit = middle if near >= 0.9 * len(finite) else None
    return {"steps": len(clipped), "of": len(steps), "norm": limit}
