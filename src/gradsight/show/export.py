"""Samples to keep, or their weights, as files that a data loader can eat. No torch."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from gradsight.errors import UsageError
from gradsight.show.influence import Influence

Floats = npt.NDArray[np.float64]


def keep_lines(
    found: Influence, by: str, drop: float | None, unscored: Iterable[str] = ()
) -> list[str]:
    """The ids of the samples to keep, one per line: those that were scored well enough, and those
    that were never scored.
    """
    kept = ~_dropped(_values(found, by), drop)
    lines = [*(str(sample_id) for sample_id in found.sample_ids[kept]), *unscored]
    if any("\n" in line for line in lines):
        raise UsageError(
            "a sample id holds a line break: export NAME.csv instead, which can quote it"
        )
    if not lines:
        raise UsageError(
            "nothing would be left to keep: every sample scores below 0. Say how many to leave out, for example --drop 0.1"
        )
    return lines


def weight_lines(found: Influence, by: str, drop: float | None) -> list[str]:
    """sample_id,weight: in proportion to the score, 0 for what is left out; 1 on average, like a
    sample without a score.
    """
    values = _values(found, by)
    weights = np.where(_dropped(values, drop), 0.0, np.maximum(values, 0.0))
    if not weights.any():
        raise UsageError(
            "every weight would be 0: no sample scores above 0, so there is nothing to weigh by"
        )
    weights /= weights.mean()
    rows = zip(found.sample_ids.tolist(), weights.tolist(), strict=True)
    return [
        "sample_id,weight",
        *(f"{_quoted(sample_id)},{weight:.4g}" for sample_id, weight in rows),
    ]


def _values(found: Influence, by: str) -> Floats:
    """Each sample's own score, or its domain's."""
    if by == "sample":
        return found.scores
    if not found.domains:
        raise UsageError("--by domain: the samples of this run have no domains")
    scores = {each.name: each.score for each in found.domains}
    names, place = np.unique([name or "" for name in found.sample_domains], return_inverse=True)
    values: Floats = np.array([scores.get(name, np.nan) for name in names])[place]
    return np.where(np.isnan(values), found.scores, values)


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
