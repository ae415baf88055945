"""GS301: parameters that never get a gradient."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window

_CUT = (
    ". Reentrant checkpointing was given inputs that need no gradient (frozen embeddings), which "
    "cuts off all that it holds: call model.enable_input_require_grads()"
)


@check(
    "GS301",
    "never gets a gradient",
    "warning",
    asked=Asked(when="stretch", needs=("norms", "optimizer")),
    advice=Advice(
        recommendation=(
            "The optimizer has these parameters, but the loss never reaches them: look for "
            "detach(), no_grad(), .data, a branch that is not used, or take them out. With frozen "
            "embeddings and reentrant checkpointing, call model.enable_input_require_grads(), or "
            "checkpoint with use_reentrant=False."
        ),
        fix="""
# before the loop: freeze parameters that the loss never reaches
# (if they should learn, find the detach() or no_grad() instead)
loss_fn(model(inputs), targets).backward()
for name, parameter in model.named_parameters():
    if parameter.requires_grad and parameter.grad is None:
        print(f"Cut off from the loss: {name}")
        parameter.requires_grad_(False)
model.zero_grad()
""",
    ),
)
def never(window: Window, *, steps: int = 10, steps_of_twins: int = 50) -> Iterator[Fact]:
    """Parameters that the optimizer holds never get a gradient.

    Why: they stay as they were initialised, silently. Parameters that no optimizer holds may be
    left out on purpose. One of several twins (an expert, a layer that is dropped at times) may have
    to wait for its turn, and a bias may cancel out of the loss while its layer learns. Parameters
    whose gradient the script sets to None between backward and step are frozen on purpose.
    """
    if (
        window.steps_seen < steps
        or window.subject.memberships is None
        or not window.alive.any()
        or window.alive.all()
    ):
        return
    held = np.array(window.subject.memberships) > 0
    rows = np.flatnonzero(held & np.array(window.subject.trainable) & ~window.alive)
    rows = rows[[not _is_excused(window, row, steps_of_twins) for row in rows.tolist()]]
    if len(rows):
        none = int((~window.received[rows]).sum())
        zero = len(rows) - none
        seen = [f"{none} of {held.sum()} parameters had no gradient"] if none else []
        if zero:
            of = "" if none else f" of {held.sum()} parameters"
            seen.append(f"{zero}{of} had a gradient of exactly zero")
        why = _CUT if window.cut_by_checkpoint else ""
        yield Fact(
            f"in {window.steps_seen} steps, {' and '.join(seen)}{why}",
            window.named(rows),
            first_step=window.first_step,
        )


def _is_excused(window: Window, row: int, steps_of_twins: int) -> bool:
    """Return whether there is a harmless reason.

    The bias cancels out of the loss, the script froze the parameter, it belongs to a pooler, or
    similar layers get gradients and this one may still get its own, as an expert does.
    """
    matrices = window.subject.matrices
    if window.received[row] and matrices and window.started_at_zero[matrices].all():
        return True  # a model of zeros, which GS107 explains
    if window.reached[row] and not window.received[row]:
        return True  # the script took it away before the step, as where a layer waits some epochs
    if "pooler" in window.subject.names[row].split(".") and not window.received[row]:
        return True  # language models have a pooler, and most losses do not use it
    names, alive = window.subject.names, np.flatnonzero(window.alive).tolist()
    layer = names[row].rpartition(".")[0]
    # The last bias of a Wasserstein critic cancels out of its loss: its gradient is exactly 0.
    if window.received[row] and any(names[other].rpartition(".")[0] == layer for other in alive):
        return True
    return window.steps_seen < steps_of_twins and any(
        _kind(window, other) == _kind(window, row) for other in alive
    )


def _kind(window: Window, row: int) -> tuple[str, tuple[int, ...]]:
    """The name without its numbers, and the shape: the same for all twins."""
    subject = window.subject
    return ".".join(
        "#" if part.isdigit() else part for part in subject.names[row].split(".")
    ), subject.shapes[row]
