"""Two dumps side by side: did a refactoring or a kernel change the gradients? No torch."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradsight.core import limits
from gradsight.dump.folders import FOLDERS, find_dumps, step_of
from gradsight.dump.manifest import ITEM_BYTES, Box, Entry, Manifest, read
from gradsight.dump.reader import Slices, stored_blocks
from gradsight.dump.values import StoredValues, Values, slabs, values
from gradsight.errors import RunError, UsageError


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
    pairs = _Side(first, name, a), _Side(second, name, b)
    return difference(one.step, name, Pairs(*pairs), note)


@dataclass(frozen=True, slots=True)
class _Side:
    """A gradient of one of the two dumps."""

    folder: Path
    name: str
    entry: Entry

    @property
    def boxes(self) -> list[Box]:
        """Where its chunks lie in it."""
        return [(chunk.offsets, chunk.sizes) for chunk in self.entry.chunks]

    def part(self, index: Slices) -> Values:
        """A part of it, whose checksums were compared before."""
        return values(self.folder, self.name, self.entry, index, check=False)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Two gradients of one shape, part by part."""

    first: _Side
    second: _Side

    def __iter__(self) -> Iterator[tuple[Values, Values]]:
        first, second = self.first, self.second
        same_width = ITEM_BYTES[first.entry.dtype] == ITEM_BYTES[second.entry.dtype]
        if first.boxes == second.boxes and same_width:
            stored = (StoredValues(each.folder, each.name, each.entry) for each in (first, second))
            yield from zip(*stored, strict=True)
            return
        # Cut in other ways: parts of each are looked up in all chunks of the other.
        chunks = max(len(first.boxes), len(second.boxes))
        if chunks > limits.CHUNKS_COMPARED:
            raise RunError(
                f"the gradient of {first.name!r} lies in {chunks} pieces, which are others in "
                f"the two dumps: more than {limits.CHUNKS_COMPARED} are not compared"
            )
        for side in (first, second):
            for _ in stored_blocks(side.folder, side.name, side.entry):
                pass  # for the checksums
        for index in slabs(first.entry.shape, limits.ENTRIES_AT_ONCE):
            yield first.part(index), second.part(index)


def difference(
    step: int, name: str, pairs: Iterable[tuple[Values, Values]], note: str = ""
) -> Difference:
    """How far two gradients of the same shape are apart, given part by part, and asked for twice.

    >>> difference(0, "w", [(np.array([1.0, -4.0]), np.array([1.0, -3.0]))]).relative
    0.25
    """
    # Everything that a cosine needs is scaled by these, so that squares do not overflow.
    scale_a = scale_b = absolute = largest = 0.0
    all_finite = alike = True
    for a, b in pairs:
        a, b = _wide(a), _wide(b)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        finite = np.isfinite(a) & np.isfinite(b)
        alike = alike and bool((same | finite).all())
        all_finite = all_finite and bool(finite.all())
        scale_a = max(scale_a, _largest(a[finite]))
        scale_b = max(scale_b, _largest(b[finite]))
        largest = max(scale_a, scale_b)
        with np.errstate(over="ignore"):
            absolute = max(absolute, _largest(a[finite & ~same] - b[finite & ~same]))
    if not alike:
        text = note or "NaN or infinite on one side only"
        return Difference(step, name, math.inf, math.inf, None, text)
    relative = absolute / largest if absolute else 0.0
    cosine = None
    if all_finite and scale_a and scale_b:
        cosine = _cosine(pairs, scale_a, scale_b)
    return Difference(step, name, absolute, relative, cosine, note)


def _wide(values: Values) -> Values:
    """In double precision, one after the other."""
    wide = np.complex128 if np.iscomplexobj(values) else np.float64
    with np.errstate(invalid="ignore"):
        return values.reshape(-1).astype(wide)


def _largest(values: Values) -> float:
    """The largest magnitude; 0 of nothing."""
    return float(np.abs(values).max(initial=0.0))


def _cosine(pairs: Iterable[tuple[Values, Values]], scale_a: float, scale_b: float) -> float:
    """The cosine of the angle between two gradients of these largest magnitudes."""
    product = square_a = square_b = 0.0
    for a, b in pairs:
        a, b = _wide(a) / scale_a, _wide(b) / scale_b
        product += float(np.vdot(a, b).real)
        square_a += float(np.vdot(a, a).real)
        square_b += float(np.vdot(b, b).real)
    return product / math.sqrt(square_a * square_b)
