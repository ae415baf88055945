"""Numbers about one dumped gradient, exact, over every entry. No torch."""

from dataclasses import dataclass

import numpy as np

from gradsight.dump.values import Values

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
BINS = 24


@dataclass(frozen=True, slots=True)
class Statistics:
    """One gradient in numbers: of its finite entries, a complex entry counting as two."""

    count: int
    norm: float
    minimum: float
    maximum: float
    mean: float
    quantiles: tuple[float, ...]
    """At 1, 25, 50, 75 and 99 percent."""
    zeros: int
    nan: int
    inf: int
    histogram: tuple[int, ...]
    """Counts in BINS equal bins from minimum to maximum."""


def measure(values: Values) -> Statistics:
    """Look at every entry of a gradient."""
    flat = np.ascontiguousarray(values).reshape(-1)
    if np.iscomplexobj(flat):
        flat = flat.view(flat.real.dtype)
    nan = int(np.isnan(flat).sum())
    inf = int(np.isinf(flat).sum())
    if nan or inf:
        finite = flat[np.isfinite(flat)].astype(np.float64)
    else:
        finite = flat.astype(np.float64)
    if not len(finite):
        nothing = float("nan")
        return Statistics(
            len(flat),
            nothing,
            nothing,
            nothing,
            nothing,
            (nothing,) * len(QUANTILES),
            0,
            nan,
            inf,
            (0,) * BINS,
        )
    low = float(finite.min())
    high = float(finite.max())
    # One value alone gets bins of its own width, as numpy does by itself.
    spread = (low, high) if high > low else (low - 0.5, low + 0.5)
    counts, _ = np.histogram(finite, bins=BINS, range=spread)
    return Statistics(
        count=len(flat),
        norm=_norm(finite),
        minimum=low,
        maximum=high,
        mean=float(finite.mean()),
        quantiles=tuple(float(value) for value in np.quantile(finite, QUANTILES)),
        zeros=int((finite == 0).sum()),
        nan=nan,
        inf=inf,
        histogram=tuple(int(count) for count in counts),
    )


def _norm(finite: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """The L2 norm, scaled so that squares neither overflow nor vanish."""
    largest = float(np.abs(finite).max())
    if largest == 0.0:
        return 0.0
    return largest * float(np.sqrt(np.square(finite / largest).sum()))
