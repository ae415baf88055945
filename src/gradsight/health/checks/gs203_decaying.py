"""GS203: decay to nothing."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from gradsight.health.baseline import NOTHING_AT_ALL
from gradsight.health.fixes import LOWER_RATE, NO_SATURATION
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS203",
    "decaying gradient",
    "warning",
    asked=Asked(when="stretch"),
    advice=Advice(
        recommendation=(
            "Training stalls although the loss is not solved. Long steps push units into "
            "saturation, or kill them: lower the learning rate, and use activations that do not "
            "saturate."
        ),
        fix=LOWER_RATE + NO_SATURATION,
    ),
)
def decay(
    window: Window, *, factor: float = 1000.0, limit: float = 0.001, patience: int = 2
) -> Iterator[Fact]:
    """The gradient, or that of single layers, has decayed to nothing while the loss has not.

    Why: a solved problem and a stalled one both have no gradient; only the loss tells them apart.
    With one batch for ever, a gradient of nothing is a minimum; with a new one every time its noise
    would keep the gradient up, were it not cut off. A layer whose gradient dies while those of the
    others hold learns nothing any more.
    """
    if window.now.signals.one_batch:
        return
    whole = list(_whole(window, factor, limit))
    yield from whole or _single_layers(window, factor)


def _whole(window: Window, factor: float, limit: float) -> Iterator[Fact]:
    # None, not known, does not do: without a loss a solved problem looks like a stalled one.
    if (
        len(window.totals) < 20
        or min(islice(reversed(window.totals), 10)) >= limit
        or window.converging is not False
    ):
        return
    totals = np.array(window.totals)
    early, late = float(np.max(totals[: len(totals) // 2])), float(np.median(totals[-10:]))
    first, last = (
        float(np.median(window.first_losses[:5])),
        float(np.median(list(window.losses)[-10:])),
    )
    if late < limit and late * factor < early and last > 0.3 * first:
        yield Fact(
            f"norm {early:.3g} → {late:.3g}, while the loss went from {first:.3g} to {last:.3g}"
        )


def _single_layers(window: Window, factor: float) -> Iterator[Fact]:
    """Matrices that have lost their gradient while the whole has kept most of its own."""
    usual, peaks = window.baseline.median, window.peaks
    if usual is None or peaks is None or len(usual) != len(peaks) or not window.finite:
        return
    lost = peaks - usual
    # The whole may shrink as it likes in learning: what counts is what a layer loses beside it.
    matrices = np.array(window.subject.matrices, dtype=np.intp)
    if not len(matrices) or lost[-1] > np.log(factor) / 2:
        return
    rows = matrices[lost[matrices] - max(0.0, lost[-1]) > np.log(factor)]
    rows = rows[[_is_no_twin(window, row) for row in rows.tolist()]]
    if not len(rows) or len(rows) > 0.5 * len(matrices):
        return
    worst = rows[np.argmax(lost[rows])]
    early, late = np.exp(peaks[worst]), np.exp(usual[worst])
    text = (
        f"{window.subject.names[worst]}: usual norm {early:.2g} → {late:.2g}, while the whole "
        f"went from {np.exp(peaks[-1]):.2g} to {np.exp(usual[-1]):.2g}"
    )
    yield Fact(text, window.named(rows))


def _is_no_twin(window: Window, row: int) -> bool:
    """Whether it has a gradient, however small: an expert without one may wait for its turn."""
    usual = window.baseline.median
    return usual is not None and bool(usual[row] > NOTHING_AT_ALL)
