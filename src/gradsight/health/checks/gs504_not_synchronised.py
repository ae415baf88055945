"""GS504: ranks not synchronised."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, AsIncident, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.measured import RankDigests


@check(
    "GS504",
    "ranks not synchronised",
    "critical",
    asked=Asked(when="digests", needs=("rank digests",)),
    incident=AsIncident(kept="never"),
    advice=Advice(
        recommendation=(
            "Each rank trains its own model, because the gradients are not averaged over the "
            "ranks. Wrap the model in DistributedDataParallel before you create the optimizer. If "
            "the ranks train separate models on purpose, silence this check."
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
    if digests is None or not digests.same_start or digests.same_weights is not False:
        return
    text = (
        f"the weights of {digests.ranks} ranks were equal at the start and are different after "
        f"step {digests.step}"
    )
    if updates_differ(digests):
        text += ", although all ranks used the same gradient"
        yield Fact(text, severity="warning", first_step=digests.step, advice=_UPDATES_DIFFER)
        return
    if digests.parallel not in (None, "uncalled ddp"):
        return
    if digests.same_gradient is False:
        text += ", and the ranks used different gradients"
    if digests.parallel is None:
        text += "; no DistributedDataParallel or FSDP2 was found"
        yield Fact(text, first_step=digests.step)
        return
    text += (
        "; a DistributedDataParallel model exists, but it was never called: the loop calls the "
        "module inside it"
    )
    yield Fact(text, first_step=digests.step, advice=_CALL_THE_WRAPPER)


def updates_differ(digests: RankDigests) -> bool:
    """Return whether DDP ranks computed different weights from the same gradient."""
    # Ranks with different gradients may be local SGD, which averages weights from time to time.
    is_seen = bool(digests.same_gradient) and digests.same_weights is False
    return digests.parallel == "ddp" and bool(digests.same_start) and is_seen


_CALL_THE_WRAPPER = Advice(
    recommendation=(
        "Each rank trains its own model, because gradients are averaged only if the loop calls the "
        "wrapped model. Call the model that DistributedDataParallel or accelerator.prepare(model) "
        "returned, not the module inside it. If the loop calls another method of the module, call "
        "that method inside forward(). If the ranks train separate models on purpose, silence "
        "this check."
    ),
    fix="""
# before the loop, in place of your line with DistributedDataParallel
# (keep your other arguments, such as device_ids; with accelerate:
# model, optimizer = accelerator.prepare(model, optimizer))
model = torch.nn.parallel.DistributedDataParallel(model)

# in the loop
outputs = model(inputs)
""",
)
_UPDATES_DIFFER = Advice(
    recommendation=(
        "The ranks agree on the gradient, but not on the update that the optimizer computes from "
        "it. An optimizer that divides its work among the ranks must send the updated weights, or "
        "the updates, to all ranks (all_reduce, all_gather, broadcast). If you add noise to the "
        "weights, use the same random seed on all ranks. Do not change weights on one rank only."
    ),
    fix="""
# after optimizer.step(): do all ranks have the same weights?
for name, parameter in model.named_parameters():
    first = parameter.detach().clone()
    torch.distributed.broadcast(first, src=0)
    if not torch.equal(first, parameter):
        print(torch.distributed.get_rank(), name, "differs from rank 0")
""",
)
