"""Two runs side by side: where they part, and what else of them differs. No torch.

Runs are the same where the numbers of their common steps are: norms and largest entries of every
gradient, loss, learning rate, total norm, clipping, loss scale, skipped steps.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gradsight.store.stat_chunks import NO_GRADIENT, StatChunk
from gradsight.values.findings import Finding
from gradsight.values.steps import THINNED, Step

NOISE = 1e-4
"""Relative difference that rounding can explain: another order of additions."""
FLOOR = 1e-8
"""Of the largest gradient of a step: what is that small is rounding from end to end.

The gradient of a bias before a normalisation is zero on paper, and another zero in every run.
"""
STATISTICS = ("l2", "max_abs")
NUMBERS = ("loss", "lr", "total_norm", "clip_coef", "scale")

Floats = npt.NDArray[np.float64]


class ComparableRun(Protocol):
    """What a comparison needs of a run."""

    @property
    def config(self) -> dict[str, Any]: ...
    def steps(self) -> Iterable[Step]: ...
    def stat_chunks(self, after: int = ...) -> Iterator[StatChunk]: ...
    def findings(self) -> Iterable[Finding]: ...


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """A number that is not the same in both runs."""

    step: int
    parameter: str | None
    """None where it is a number of the whole step."""
    what: str
    """ "l2", "max_abs", "loss" and so on; "missing" where one run lacks the step."""
    a: float | None
    """None where the first run has none, such as no gradient."""
    b: float | None


@dataclass(frozen=True, slots=True)
class Lone:
    """Steps that only one of the runs has."""

    count: int
    first: int | None
    last: int | None


@dataclass(frozen=True, slots=True)
class OneSided:
    """A number that only one of the runs has at some of their common steps."""

    what: str
    """ "loss", "lr" and so on."""
    only_a: int
    """At how many steps only the first run has it."""
    only_b: int
    first: int
    """The first of all these steps."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting or a version that is not the same in both runs."""

    name: str
    a: object
    b: object


@dataclass(frozen=True)
class RunComparison:
    """What two runs have in common, and what not."""

    exact: bool
    common_steps: int
    only_a: Lone
    only_b: Lone
    parameters: tuple[FirstDifference, ...]
    """Where each parameter that differs does so first, in the order of steps."""
    numbers: tuple[FirstDifference, ...]
    """Where loss, learning rate and so on differ first."""
    one_sided: tuple[OneSided, ...]
    """Numbers that one run did not record, and so cannot be compared there."""
    findings_a: tuple[Finding, ...]
    """Findings of the first run alone."""
    findings_b: tuple[Finding, ...]
    settings: tuple[Setting, ...]
    versions: tuple[Setting, ...]

    @property
    def first(self) -> FirstDifference | None:
        """Where the runs part: the first gradient that differs, or else the first number."""
        if self.parameters:
            return self.parameters[0]
        if self.numbers:
            return self.numbers[0]
        return None

    @property
    def same(self) -> bool:
        """Whether there are common steps, and all numbers that both have there are the same."""
        return self.first is None and (
            self.common_steps > 0 or not (self.only_a.count + self.only_b.count)
        )


def compare_runs(a: ComparableRun, b: ComparableRun, exact: bool = False) -> RunComparison:
    """Compare the steps that both runs have."""
    steps_a = {step.step: step for step in a.steps()}
    steps_b = {step.step: step for step in b.steps()}
    thinned = _take_thinned(steps_a, steps_b)
    common = sorted(steps_a.keys() & steps_b.keys())
    noise = Tolerance(0.0, 0.0) if exact else Tolerance(NOISE, FLOOR)
    config_a = a.config
    config_b = b.config
    return RunComparison(
        exact=exact,
        common_steps=len(common),
        only_a=_lone(steps_a.keys() - steps_b.keys()),
        only_b=_lone(steps_b.keys() - steps_a.keys()),
        parameters=tuple(_first_of_parameters(a, b, noise, thinned)),
        numbers=tuple(_first_of_numbers(steps_a, steps_b, noise)),
        one_sided=tuple(_one_sided(steps_a, steps_b, common)),
        findings_a=_alone(a.findings(), b.findings(), common),
        findings_b=_alone(b.findings(), a.findings(), common),
        settings=_settings(config_a.get("settings"), config_b.get("settings")),
        versions=_settings(config_a.get("versions"), config_b.get("versions")),
    )


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two numbers may be apart and still be the same."""

    relative: float
    of_the_largest: float

    def apart(self, a: Floats, b: Floats) -> npt.NDArray[np.bool_]:
        """Where they are not the same; the same infinity is, and NaN is the same as NaN.

        Rows are steps: what is small beside the largest of its row is rounding.
        """
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(a - b)
            size = np.maximum(np.abs(a), np.abs(b))
            finite = np.where(np.isfinite(size), size, 0.0)
            largest = finite.max(axis=-1, keepdims=True, initial=0.0)
            allowed = np.maximum(self.relative * size, self.of_the_largest * largest)
            # Not `>`: the distance to a NaN, and to an infinity, is beyond every tolerance.
            close = distance <= np.where(np.isfinite(size), allowed, -1.0)
        same: npt.NDArray[np.bool_] = close | (a == b) | (np.isnan(a) & np.isnan(b))
        return ~same


def _take_thinned(a: dict[int, Step], b: dict[int, Step]) -> Set[int]:
    """Take out the steps that stand for several: they are nobody's numbers. Those that they stand
    for are not missing either, so what only one run has up to there goes too.
    """
    thinned = {step for run in (a, b) for step in run if run[step].gradient.startswith(THINNED)}
    until = max(thinned, default=-1)
    lone = {step for step in a.keys() ^ b.keys() if step <= until}
    for run in (a, b):
        for step in (thinned | lone) & run.keys():
            del run[step]
    return thinned


def _first_of_parameters(
    a: ComparableRun, b: ComparableRun, noise: Tolerance, but: Set[int]
) -> Iterator[FirstDifference]:
    """Every parameter whose gradients differ, with the first step at which they do.

    but: steps that are not compared.
    """
    known: set[str] = set()
    left_out = np.array(sorted(but), dtype=np.int64)
    for mine_all, theirs_all in aligned_chunks(a.stat_chunks(), b.stat_chunks()):
        compared = np.flatnonzero(~np.isin(mine_all.steps, left_out))
        one = mine_all.at(compared)
        other = theirs_all.at(compared)
        names = list(dict.fromkeys([*one.names, *other.names]))
        found: list[tuple[int, int, FirstDifference]] = []
        for what in STATISTICS:
            mine = _widened(one, names, what)
            theirs = _widened(other, names, what)
            apart = noise.apart(mine, theirs)
            for place in np.flatnonzero(apart.any(axis=0)).tolist():
                at = int(apart[:, place].argmax())
                values = (_measured(mine[at, place]), _measured(theirs[at, place]))
                difference = FirstDifference(int(one.steps[at]), names[place], what, *values)
                found.append((at, place, difference))
        # By step, and in one step in the order of the model; norms come before largest entries.
        for _, _, difference in sorted(found, key=lambda each: each[:2]):
            if difference.parameter not in known:
                known.add(str(difference.parameter))
                yield difference


def _measured(value: float) -> float | None:
    return None if value == NO_GRADIENT else float(value)


def _widened(chunk: StatChunk, names: Sequence[str], what: str) -> Floats:
    """A column for these parameters; where there is no gradient, as in norms."""
    place = {name: index for index, name in enumerate(names)}
    wide = np.full((len(chunk.steps), len(names)), NO_GRADIENT)
    wide[:, [place[name] for name in chunk.names]] = np.where(
        chunk.l2 == NO_GRADIENT, NO_GRADIENT, chunk.columns[what]
    )
    return wide


def aligned_chunks(
    one: Iterator[StatChunk], other: Iterator[StatChunk]
) -> Iterator[tuple[StatChunk, StatChunk]]:
    """Pairs of chunks with the same steps, those that both runs have measured."""
    mine = next(one, None)
    theirs = next(other, None)
    while mine is not None and theirs is not None:
        _, here, there = np.intersect1d(mine.steps, theirs.steps, return_indices=True)
        if len(here):
            yield mine.at(here), theirs.at(there)
        # A chunk that ends first has met all that it can meet.
        ends_first = mine.steps[-1] <= theirs.steps[-1]
        if ends_first:
            mine = next(one, None)
        else:
            theirs = next(other, None)


def _first_of_numbers(
    a: Mapping[int, Step], b: Mapping[int, Step], noise: Tolerance
) -> list[FirstDifference]:
    """The first difference of each number of a step, and the first step that one run lacks."""
    found = list(_missing(a, b))
    common = sorted(a.keys() & b.keys())
    for what in (*NUMBERS, "skipped"):
        pairs = [(step, getattr(a[step], what), getattr(b[step], what)) for step in common]
        # What only one run was told is no difference of training.
        known = [pair for pair in pairs if pair[1] is not None and pair[2] is not None]
        mine = np.array([[float(pair[1])] for pair in known]).reshape(-1, 1)
        theirs = np.array([[float(pair[2])] for pair in known]).reshape(-1, 1)
        apart = noise.apart(mine, theirs)[:, 0]
        if apart.any():
            step, left, right = known[int(apart.argmax())]
            found.append(FirstDifference(step, None, what, float(left), float(right)))
    return sorted(found, key=lambda each: each.step)


def _one_sided(
    a: Mapping[int, Step], b: Mapping[int, Step], common: Sequence[int]
) -> Iterator[OneSided]:
    """Each number of a step that only one run has at a common step."""
    for what in NUMBERS:
        in_a = {step for step in common if getattr(a[step], what) is not None}
        in_b = {step for step in common if getattr(b[step], what) is not None}
        if in_a != in_b:
            yield OneSided(what, len(in_a - in_b), len(in_b - in_a), min(in_a ^ in_b))


def _missing(a: Mapping[int, Step], b: Mapping[int, Step]) -> Iterator[FirstDifference]:
    """The first step between common ones that only one run has."""
    common = a.keys() & b.keys()
    if not common:
        return
    between = range(min(common), max(common))
    lone = sorted(step for step in a.keys() ^ b.keys() if step in between)
    for step in itertools.islice(lone, 1):
        yield FirstDifference(step, None, "missing", *(_there(step in run) for run in (a, b)))


def _lone(steps: Set[int]) -> Lone:
    return Lone(len(steps), min(steps, default=None), max(steps, default=None))


def _there(recorded: bool) -> float | None:
    return 1.0 if recorded else None


def _alone(
    mine: Iterable[Finding], theirs: Iterable[Finding], common: Sequence[int]
) -> tuple[Finding, ...]:
    """Findings of one run that the other does not have, of steps that both have."""
    known = {(finding.code, finding.first_step) for finding in theirs}
    last = common[-1] if common else -1
    return tuple(
        finding
        for finding in mine
        if (finding.code, finding.first_step) not in known and finding.first_step <= last
    )


def _settings(a: object, b: object, name: str = "") -> tuple[Setting, ...]:
    """Leaves of two nested settings that are not the same, by their dotted names."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [*a, *(key for key in b if key not in a)]
        parts = (_settings(a.get(key), b.get(key), f"{name}.{key}".lstrip(".")) for key in keys)
        return tuple(itertools.chain.from_iterable(parts))
    return () if a == b else (Setting(name, a, b),)
