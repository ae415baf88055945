"""Samples to keep, or their weights, as files that a data loader can eat. No torch."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from gradsight.errors import UsageError
from gradsight.show.influence import Influence

Floats = npt.NDArray[np.float64]


def keep_lines(
    influence: Influence, by: str, drop: float | None, unscored: Iterable[str] = ()
) -> list[str]:
    """The ids of the samples to keep, one per line; a sample without a score is kept."""
    kept = ~_dropped(_values(influence, by), drop)
    lines = [*(str(sample_id) for sample_id in influence.sample_ids[kept]), *unscored]
    if any("\n" in line for line in lines):
        raise UsageError(
            "a sample id holds a line break: export NAME.csv instead, which can quote it"
        )
    if not lines:
        raise UsageError(
            "nothing would be left to keep: every sample scores below 0. "
            "Say how many to leave out, for example --drop 0.1"
        )
    return lines


def weight_lines(influence: Influence, by: str, drop: float | None) -> list[str]:
    """Lines of sample_id,weight: in proportion to the score, and 0 for what is left out.

    Weights are 1 on average, which is the weight of a sample without a score.
    """
    values = _values(influence, by)
    weights = np.where(_dropped(values, drop), 0.0, np.maximum(values, 0.0))
    if not weights.any():
        raise UsageError(
            "every weight would be 0: no sample scores above 0, so there is nothing to weigh by"
        )
    weights /= weights.mean()
    rows = zip(influence.sample_ids.tolist(), weights.tolist(), strict=True)
    lines = [f"{_quoted(sample_id)},{weight:.4g}" for sample_id, weight in rows]
    return ["sample_id,weight", *lines]


def _values(influence: Influence, by: str) -> Floats:
    """Each sample's own score, or its domain's."""
    if by == "sample":
        return influence.scores
    if not influence.domains:
        raise UsageError("--by domain: the samples of this run have no domains")
    scores = {domain.name: domain.score for domain in influence.domains}
    domains = [name or "" for name in influence.sample_domains]
    names, place = np.unique(domains, return_inverse=True)
    # A sample without a domain goes by its own score.
    values: Floats = np.array([scores.get(name, np.nan) for name in names])[place]
    return np.where(np.isnan(values), influence.scores, values)


def _dropped(values: Floats, drop: float | None) -> npt.NDArray[np.bool_]:
    """The samples below 0, or this share of all, the worst first."""
    if drop is None:
        below: npt.NDArray[np.bool_] = values < 0
        return below
    worst = np.argsort(values, kind="stable")[: round(drop * len(values))]
    return np.isin(np.arange(len(values)), worst)


def _quoted(sample_id: str) -> str:
    """As CSV has it where an id holds a comma, a quote or a line break."""
    if any(sign in sample_id for sign in ',"\n\r'):
        return '"' + sample_id.replace('"', '""') + '"'
    return sample_id
