"""GS303: in the optimizer twice."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window

_LIST_TWICE = """
# before the loop: list what is held more than once
# (put all your optimizers into the list)
optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
groups = [group for each in optimizers for group in each.param_groups]
held = [id(each) for group in groups for each in group["params"]]
for name, parameter in model.named_parameters():
    if held.count(id(parameter)) > 1:
        print(f"Held more than once: {name}")
"""


@check(
    "GS303",
    "twice in the optimizer",
    "warning",
    asked=Asked(when="look", needs=("optimizer",)),
    advice=Advice(
        recommendation=(
            "These parameters are updated more than once per step, so their effective learning "
            "rate is higher: give each to one optimizer, once."
        ),
        fix=_LIST_TWICE,
    ),
)
def twice(window: Window) -> Iterator[Fact]:
    """Parameters are updated more than once by the same gradient.

    Why: each occurrence makes its own update, so the effective learning rate is higher. Usually two
    lists of parameters overlap. Two optimizers may hold the same parameters if only one of them
    steps after each backward pass, and if there are gradients whenever either of them steps.
    """
    # torch refuses a parameter in two groups of one optimizer, only warns of one twice in a group,
    # and knows nothing of a second optimizer.
    counts = window.subject.memberships or ()
    repeated = {row for row, count in enumerate(counts) if count > 1}
    if window.updated_twice:
        rows, how = repeated | window.updated_twice, "updated by two optimizers"
    elif repeated:
        rows, how = repeated, "held twice"
    else:
        rows = window.held_in_vain
        how = "in two optimizers, one of which has no gradient whenever it steps"
    if rows:
        yield Fact(
            f"{len(rows)} parameters are {how}",
            window.named(sorted(rows)),
            first_step=window.first_step,
            advice=None if window.updated_twice or repeated else _WRONG_NETWORK,
        )


_WRONG_NETWORK = Advice(
    recommendation=(
        "One of the two optimizers does nothing: it was probably meant to hold another network. "
        "Give each network to its own optimizer."
    ),
    fix=_LIST_TWICE,
)
