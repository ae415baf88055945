"""What samples and domains did to a target's loss: scores, comparable and added up. No torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gradsight.errors import RunError, UsageError

if TYPE_CHECKING:
    import pyarrow

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

UNSETTLED = 0.1
"""The share of a run, at its beginning, whose scores do not count.

At first a model learns which tokens are common, and that from any sample.
"""
CLEAR = 0.1
"""How large the sum of a step's scores must be, against the sum of their sizes, to be divided by:
in a step whose scores cancel, a share of almost nothing would outweigh all other steps."""
STRETCHES = 24
"""Into how many stretches of steps a domain's curve is divided."""


@dataclass(frozen=True)
class Domain:
    """The samples of one domain together."""

    name: str
    score: float
    """The mean over its scores."""
    samples: int
    below_zero: float
    """The share of its samples that hurt the target."""
    over_time: tuple[float | None, ...]
    """Its mean score in equal stretches of the run; None where none of its samples was seen."""


@dataclass(frozen=True)
class Influence:
    """Every sample's mean score for one target, worst first. Positive helps."""

    target: str
    targets: tuple[str, ...]
    """All that the run has."""
    normalised: bool
    """Whether scores were divided by their typical size in the step."""
    first_step: int
    last_step: int
    rows: int
    """Scores that count."""
    not_finite: int
    """Scores that are NaN or infinite; they count nowhere."""
    sample_ids: npt.NDArray[np.object_]
    sample_domains: npt.NDArray[np.object_]
    seen: Ints
    scores: Floats
    domains: tuple[Domain, ...]
    """The best first."""
    is_share: bool = False
    """Whether scores were divided by the decrease that their step predicts."""
    steps_left_out: int = 0
    """Steps without a clear decrease, where that was asked for."""

    def histogram(self, bins: int = 12) -> tuple[Ints, Floats]:
        """Counts of samples and edges of about this many bins, one of the edges 0.

        The few samples beyond the edges count in the outer bins.
        """
        # One sample far out would else make every bin so wide that all others share one.
        low, high = (float(value) for value in np.quantile(self.scores, (0.005, 0.995)))
        width = _round_width((max(high, 0.0) - min(low, 0.0)) / bins)
        first = np.floor(min(low, -width) / width)
        last = np.ceil(max(high, width) / width)
        edges = width * np.arange(first, last + 1)
        counts, _ = np.histogram(np.clip(self.scores, edges[0], edges[-1]), edges)
        return counts.astype(np.int64), edges


def _round_width(width: float) -> float:
    """The nearest larger 1, 2 or 5 times a power of ten.

    >>> _round_width(0.17), _round_width(3.0), _round_width(0.0)
    (0.2, 5.0, 1.0)
    """
    if width <= 0:
        return 1.0
    power = 10.0 ** np.floor(np.log10(width))
    for step in (1, 2, 5):
        if step * power >= width:
            return float(step * power)
    return float(10 * power)


def normalised(steps: npt.NDArray[Any], scores: Floats) -> Floats:
    """Each score divided by the typical size (root mean square) of its step's scores.

    Raw scores shrink as training goes on. The sign stays: below 0 still hurts. Nothing but the
    step's own scores enters.

    >>> normalised(np.array([0, 0, 1, 1]), np.array([30.0, -40.0, 0.3, -0.4])).round(2).tolist()
    [0.85, -1.13, 0.85, -1.13]
    """
    if not len(scores):
        return scores
    # Summed as they are, the first steps outweigh all others, and corrupted samples stay hidden.
    _, place = np.unique(steps, return_inverse=True)
    sizes = np.sqrt(np.bincount(place, scores**2) / np.bincount(place))
    return np.divide(scores, sizes[place], out=np.zeros_like(scores), where=sizes[place] > 0)


def shares(steps: npt.NDArray[Any], scores: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Each score divided by the decrease of the loss that its step predicts, the sum of its scores.

    Learning rate and clipping are the same for a whole step, and do not matter. Also, which scores
    are of steps that predict a clear decrease; those of others have no share.

    >>> steps, scores = np.array([0, 0, 1, 1, 2]), np.array([3.0, -1.0, 1.0, -1.0, -2.0])
    >>> [part.tolist() for part in shares(steps, scores)]
    [[1.5, -0.5, 0.0, 0.0, 0.0], [True, True, False, False, False]]
    """
    _, place = np.unique(steps, return_inverse=True)
    decrease = np.bincount(place, scores)[place]
    clear = decrease > CLEAR * np.bincount(place, np.abs(scores))[place]
    return np.divide(scores, decrease, out=np.zeros_like(scores), where=clear), clear


def settled(steps: npt.NDArray[Any], share: float = UNSETTLED) -> npt.NDArray[np.bool_]:
    """Which scores count: all but those of the first share of the steps.

    >>> settled(np.arange(5), 0.4).tolist()
    [False, False, True, True, True]
    """
    if not len(steps):
        return np.zeros(0, dtype=bool)
    first = int(steps.min())
    length = int(steps.max()) - first + 1
    counted: npt.NDArray[np.bool_] = steps >= first + int(share * length)
    return counted


def means(groups: npt.NDArray[Any], values: Floats, count: int) -> Floats:
    """The mean of the values of each of `count` groups; NaN for a group without any.

    >>> means(np.array([0, 0, 2]), np.array([1.0, 3.0, 5.0]), 3).tolist()
    [2.0, nan, 5.0]
    """
    sizes = np.bincount(groups, minlength=count)
    sums = np.bincount(groups, values, count)
    quotients: Floats = np.divide(sums, sizes, out=np.full(count, np.nan), where=sizes > 0)
    return quotients


def influence_of(
    table: "pyarrow.Table", target: str | None = None, *, raw: bool = False, share: bool = False
) -> Influence:
    """The influence of a table of scores on one target.

    By default scores are normalised by step, and the unsettled beginning does not count. share:
    divided by the decrease of the loss that the step predicts instead.
    """
    targets, chosen = _of_target(table["target"], target)
    steps = table["step"].to_numpy()
    scores = table["score"].to_numpy().astype(np.float64)
    finite = np.isfinite(scores)
    wanted = chosen & finite
    if not wanted.any():
        raise RunError(
            f"none of the {int(chosen.sum())} scores for this target is finite: "
            "there is nothing to compare"
        )
    if not raw:
        # First the beginning goes, then what is left is normalised: each step stands for itself.
        wanted[wanted] = settled(steps[wanted])
    left_out = 0
    if share:
        scores[wanted], clear = shares(steps[wanted], scores[wanted])
        left_out = len(np.unique(steps[wanted][~clear]))
        wanted[wanted] = clear
        if not wanted.any():
            raise RunError("no step predicts a clear decrease of the loss: there are no shares")
    elif not raw:
        scores[wanted] = normalised(steps[wanted], scores[wanted])
    # Ids are shown and exported as text, whatever they were.
    ids, sample = _codes(table["sample_id"].cast("string"), wanted)
    names, domain = _codes(table["domain"], wanted)
    values = scores[wanted]
    steps = steps[wanted]
    by_sample = means(sample, values, len(ids))
    order = np.argsort(by_sample, kind="stable")
    home = np.zeros(len(ids), dtype=np.int64)
    home[sample] = domain
    return Influence(
        target=targets[0],
        targets=tuple(sorted(targets)),
        normalised=not raw and not share,
        first_step=int(steps.min()),
        last_step=int(steps.max()),
        rows=len(values),
        not_finite=int((chosen & ~finite).sum()),
        sample_ids=ids[order],
        sample_domains=names[home][order],
        seen=np.bincount(sample, minlength=len(ids))[order],
        scores=by_sample[order],
        domains=_domains(names, domain, values, steps, home, by_sample),
        is_share=share,
        steps_left_out=left_out,
    )


def _of_target(column: Any, target: str | None) -> tuple[list[str], npt.NDArray[np.bool_]]:
    """The targets of a table, the chosen one first, and its rows; by default the most frequent."""
    names, codes = _codes(column)
    if not len(names):
        raise RunError("there are no scores")
    if target is None:
        target = names[int(np.bincount(codes).argmax())]
    if target not in names:
        raise UsageError(
            f"there is no target {target!r} in this run; it has {', '.join(sorted(names))}"
        )
    others = [name for name in names if name != target]
    return [target, *others], codes == list(names).index(target)


def _codes(
    column: Any, wanted: npt.NDArray[np.bool_] | None = None
) -> tuple[npt.NDArray[np.object_], Ints]:
    """The different values of a column of text, None last, and each row's number among them."""
    # Numbers instead of text: millions of rows are nothing unusual.
    encoded = column.dictionary_encode().combine_chunks()
    names = np.array([*encoded.dictionary.to_pylist(), None], dtype=object)
    codes = encoded.indices.fill_null(len(names) - 1).to_numpy(zero_copy_only=False)
    if wanted is not None:
        codes = codes[wanted]
    used, codes = np.unique(codes, return_inverse=True)
    return names[used], codes.astype(np.int64)


def _domains(
    names: npt.NDArray[np.object_],
    domain: Ints,
    values: Floats,
    steps: Ints,
    home: Ints,
    by_sample: Floats,
) -> tuple[Domain, ...]:
    """The roll-up by domain, overall and over time, without the samples that have none."""
    first = int(steps.min())
    length = int(steps.max()) - first + 1
    stretches = min(STRETCHES, length)
    cell = domain * stretches + (steps - first) * stretches // length
    over_time = means(cell, values, len(names) * stretches).reshape(len(names), stretches)
    score = means(domain, values, len(names))
    hurting = means(home, (by_sample < 0).astype(np.float64), len(names))
    samples = np.bincount(home, minlength=len(names))
    domains = [
        Domain(name, float(score[k]), int(samples[k]), float(hurting[k]), _known(over_time[k]))
        for k, name in enumerate(names)
        if name is not None
    ]
    return tuple(sorted(domains, key=lambda each: -each.score))


def _known(values: Floats) -> tuple[float | None, ...]:
    return tuple(None if value != value else value for value in values.tolist())
