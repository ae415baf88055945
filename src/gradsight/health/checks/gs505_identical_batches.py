"""GS505: identical batches on ranks."""

from collections.abc import Iterator

from gradsight.health.fixes import OWN_PART_OF_DATA
from gradsight.health.registry import Advice, AsIncident, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS505",
    "identical batches on ranks",
    "warning",
    asked=Asked(when="digests", needs=("rank digests",)),
    incident=AsIncident(kept="never"),
    advice=Advice(
        recommendation=(
            "All ranks train on the same batches, so additional ranks add nothing: give each rank "
            "its own part of the data. If that is intended (tensor or pipeline parallelism, or an "
            "overfitting test), silence this check."
        ),
        fix=OWN_PART_OF_DATA,
    ),
)
def identical_batches(window: Window, *, batches: int = 2) -> Iterator[Fact]:
    """The model is called with the same batch on every rank.

    Why: the ranks compute the same gradient, so training takes as many steps as on one rank.
    """
    digests = window.digests
    if digests is None or digests.parallel not in ("ddp", "loose ddp", "fsdp"):
        return
    if digests.same_batch:
        window.identical_batches += 1
    if window.identical_batches >= batches:
        text = (
            f"{digests.ranks} ranks were given identical batches at {window.identical_batches} "
            f"of the compared steps, the last one being step {digests.step}"
        )
        yield Fact(text, first_step=window.first_step)
