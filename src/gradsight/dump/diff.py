"""Two dumps side by side: did a refactoring or a kernel change the gradients? No torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradsight.dump.folders import FOLDERS, find_dumps, step_of
from gradsight.dump.manifest import Manifest, read
from gradsight.dump.values import Values, values
from gradsight.errors import UsageError


@dataclass(frozen=True, slots=True)
class Difference:
    """One gradient in two dumps.

    `relative` is max|a - b| / max(max|a|, max|b|), over all entries; NaN or infinity in the same
    place on both sides is no difference, on one side an infinite one. `cosine` is None where one
    side is zero or not finite.
    """

    step: int
    parameter: str
    absolute: float
    relative: float
    cosine: float | None
    note: str = ""


def compare(first: Path, second: Path, step: int | None = None) -> list[Difference]:
    """Every gradient of the steps that both runs have, the worst first."""
    pairs = list(_pairs(first, second, step))
    differences = [difference for a, b in pairs for difference in _compare_dumps(a, b)]
    return sorted(
        differences, key=lambda one: (-one.relative, -one.absolute, one.step, one.parameter)
    )


def _pairs(first: Path, second: Path, step: int | None) -> Iterator[tuple[Path, Path]]:
    """Dumps of the same step; two folders named directly are compared whatever their steps."""
    one, other = find_dumps(first, step), find_dumps(second, step)
    if one == [first] and other == [second]:
        yield first, second
        return
    theirs = {(step_of(folder), folder.name): folder for folder in other}
    shared = [
        (folder, theirs[step_of(folder), folder.name])
        for folder in one
        if (step_of(folder), folder.name) in theirs
    ]
    if not shared:
        raise UsageError(
            f"nothing to compare: {first} has {_steps(one)}, {second} has {_steps(other)}"
        )
    whole = {step_of(folder) for folder, _ in shared if folder.name == FOLDERS["full"]}
    yield from (
        pair for pair in shared if pair[0].name == FOLDERS["full"] or step_of(pair[0]) not in whole
    )


def _steps(folders: list[Path]) -> str:
    kinds = sorted({folder.name for folder in folders})
    numbers = ", ".join(
        str(number) for number in sorted({step_of(folder) or 0 for folder in folders})
    )
    return f"{' and '.join(kinds)} of steps {numbers}"


def _compare_dumps(first: Path, second: Path) -> Iterator[Difference]:
    one, other = read(first), read(second)
    for name in dict.fromkeys([*one.tensors, *other.tensors]):
        if name not in one.tensors or name not in other.tensors:
            side = first if name not in one.tensors else second
            yield Difference(one.step, name, math.inf, math.inf, None, f"not in {side}")
        else:
            yield _compare_one(name, first, one, second, other)


def _compare_one(
    name: str, first: Path, one: Manifest, second: Path, other: Manifest
) -> Difference:
    a, b = one.tensors[name], other.tensors[name]
    if a.shape != b.shape:
        return Difference(
            one.step,
            name,
            math.inf,
            math.inf,
            None,
            f"shape {list(a.shape)} against {list(b.shape)}",
        )
    note = "" if a.dtype == b.dtype else f"{a.dtype} against {b.dtype}"
    return difference(one.step, name, values(first, name, a), values(second, name, b), note)


def difference(step: int, name: str, a: Values, b: Values, note: str = "") -> Difference:
    """How far two arrays of the same shape are apart.

    >>> difference(0, "w", np.array([1.0, -4.0]), np.array([1.0, -3.0])).relative
    0.25
    """
    wide = np.complex128 if np.iscomplexobj(a) or np.iscomplexobj(b) else np.float64
    with np.errstate(invalid="ignore"):
        a, b = a.reshape(-1).astype(wide), b.reshape(-1).astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return Difference(step, name, 0.0, 0.0, _cosine(a, b), note)
    if not (np.isfinite(a[~same]).all() and np.isfinite(b[~same]).all()):
        return Difference(
            step, name, math.inf, math.inf, None, note or "NaN or infinite on one side only"
        )
    absolute = float(np.abs(a[~same] - b[~same]).max())
    finite = np.isfinite(a)
    largest = max(float(np.abs(a[finite]).max()), float(np.abs(b[finite]).max()))
    return Difference(step, name, absolute, absolute / largest, _cosine(a, b), note)


def _cosine(a: Values, b: Values) -> float | None:
    """The cosine of the angle between two gradients."""
    if not (len(a) and np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    scale_a, scale_b = float(np.abs(a).max()), float(np.abs(b).max())
    if not scale_a or not scale_b:
        return None
    a, b = a / scale_a, b / scale_b
    return float(np.vdot(a, b).real / (np.linalg.norm(a) * np.linalg.norm(b)))
