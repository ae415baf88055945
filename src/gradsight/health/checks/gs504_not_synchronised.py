"""GS504: ranks not synchronised."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, AsIncident, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS504",
    "ranks not synchronised",
    "critical",
    asked=Asked(when="digests", needs=("rank digests",)),
    incident=AsIncident(kept="never"),
    advice=Advice(
        recommendation=(
            "Each rank trains a model of its own: the gradients are not averaged over the ranks. "
            "Wrap the model in DistributedDataParallel before you make the optimizer. If your "
            "ranks train apart on purpose, silence it with health={'GS504': False}."
        ),
        fix="""
# before the optimizer is made: average the gradients over all ranks
model = torch.nn.parallel.DistributedDataParallel(model)
""",
    ),
)
def not_synchronised(window: Window) -> Iterator[Fact]:
    """The ranks started with equal weights, and their weights have drifted apart.

    Why: every rank learns from its own part of the data only, and only one of the models is kept.
    Models that start with different weights on each rank are left alone.
    """
    digests = window.digests
    if digests is None or digests.parallel is not None:
        return
    if digests.same_start and digests.same_weights is False:
        gradient = ""
        if digests.same_gradient is False:
            gradient = ", and the ranks used different gradients"
        text = (
            f"the weights of {digests.ranks} ranks were equal at the start and are different "
            f"after step {digests.step}{gradient}; no DistributedDataParallel or FSDP2 was found"
        )
        yield Fact(text, first_step=digests.step)
