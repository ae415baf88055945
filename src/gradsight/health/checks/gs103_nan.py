"""GS103: NaN in a gradient."""

from collections.abc import Iterator

from gradsight.health.bad_steps import EarlyLook, nan_rows
from gradsight.health.fixes import BFLOAT16, DROP_SAMPLES, SAFE_LOG, STABLE_CLASSES
from gradsight.health.registry import Advice, AsIncident, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.measured import Flags


def _in_sight(look: EarlyLook) -> bool:
    return look.norms.counts is not None and bool(nan_rows(look.norms).any())


@check(
    "GS103",
    "NaN gradient",
    "critical",
    # A finite norm proves that no entry is NaN or infinite: only bad steps need the look.
    asked=Asked(gate=lambda window: not window.finite),
    incident=AsIncident(alarm=_in_sight),
    advice=Advice(
        recommendation=(
            "Look at the loss and the batch of this step first (log of 0, division by 0, a "
            "NaN in the data or the labels), then lower the learning rate."
        ),
        fix=DROP_SAMPLES + STABLE_CLASSES + SAFE_LOG,
    ),
)
def nan(window: Window) -> Iterator[Fact]:
    """A gradient is NaN.

    Why: the optimizer's next step makes the weights NaN too, and nothing brings them back. Backward
    runs from the last layer to the first: the fault sits where the first broken layer follows a
    clean one.
    """
    if window.broken and window.norms is not None:
        yield from broken_rows(window, nan_rows(window.norms), "NaN")


def broken_rows(window: Window, broken: Flags, what: str) -> Iterator[Fact]:
    """The parameters with such entries, and where backward first met them."""
    rows = window.now.rows
    if rows is None:
        rows = tuple(range(len(window.l2)))
    bad = [row for row, count in zip(rows, broken.tolist(), strict=True) if count]
    if not bad:
        return
    names = window.named(bad)
    # The clean layer nearest to the broken ones in backward order sits just above the fault.
    clean = [row for row in rows if row > bad[-1]]
    where = "from the last layer on"
    if clean:
        where = f"backward is clean down to {window.subject.names[clean[0]]}"
    text = f"{what} in {len(bad)} of {len(rows)} parameters at step {window.step.step}, {where}"
    weights = window.now.signals.broken_weights
    if weights is not None:
        text += f"; the weights are {weights.are} since step {weights.since}"
    eps = window.subject.lost_eps
    if weights is None or eps is None:
        yield Fact(text, names[::-1])
        return
    text += f"; the optimizer's eps, {eps:g}, is 0 in float16"
    yield Fact(text, names[::-1], advice=_LARGER_EPS)


_LARGER_EPS = Advice(
    recommendation=(
        "The optimizer's eps is 0 in float16, so Adam divides by 0 wherever a gradient is small: "
        "keep the weights in float32 and use autocast, or give it an eps of 1e-4 or more."
    ),
    fix=BFLOAT16,
)
