"""GS106: no gradient at all."""

from collections.abc import Iterator

from gradsight.health.fixes import LIVING_UNITS, START_ADAPTERS
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.adapters import is_of_an_adapter
from gradsight.values.steps import NO_GRADIENT

ONE_CLASS = Advice(
    recommendation=(
        "A softmax over a single class is always 1, so the loss is the same whatever the model "
        "gives. Give the model one output per class. Or leave the softmax out: use "
        "binary_cross_entropy_with_logits for a yes or no, and mse_loss for a number."
    ),
    fix="""
# before the loop: a loss of one output per sample
# (targets from 0 to 1; take nn.MSELoss for other numbers)
criterion = nn.BCEWithLogitsLoss()

# in the loop, instead of the forward pass: use it
outputs = model(inputs)
loss = criterion(outputs, targets.to(outputs.dtype).reshape_as(outputs))
""",
)
EQUAL = Advice(
    recommendation=(
        "The loss compares the model's output with a copy of itself: check that the teacher is "
        "another model than the student, and that the targets were not computed from the output."
    ),
    fix="""
# in the loop, before loss.backward(): compare the output with its target
outputs = model(inputs)
if outputs.shape == targets.shape and torch.allclose(outputs, targets):
    print("The targets are the model's own outputs")
""",
)


@check(
    "GS106",
    "zero gradient",
    "critical",
    # Not even norms: where no parameter has a gradient there are none to be seen.
    asked=Asked(needs=()),
    advice=Advice(
        recommendation=(
            "Nothing is learned: check that backward() runs on the loss of this model, that "
            "its parameters are not all frozen, and that no detach(), no_grad(), factor of 0 or "
            "dead ReLU cuts it off."
        ),
        fix="""
# in the loop, after loss.backward(): list parameters without a gradient
for name, parameter in model.named_parameters():
    if not parameter.requires_grad:
        print(f"Frozen: {name}")
    elif parameter.grad is None:
        print(f"Cut off from the loss: {name}")
"""
        + LIVING_UNITS,
    ),
)
def zero(
    window: Window, *, patience: int = 3, zero_loss_steps: int = 20, rounding: float = 1e-6
) -> Iterator[Fact]:
    """No gradient reaches any parameter: nothing is learned.

    Why: the optimizer's steps change nothing, or only decay the weights. A loss that has fallen
    to exactly 0, as a margin loss can, leaves nothing to learn and is not reported. A loss that is
    exactly 0 from the first step on is reported after `zero_loss_steps` steps. Fewer steps may be
    chance: batches that hold only padding, triplets that keep their margin, rewards that are all
    the same. If the reason is known, as for cross_entropy over a single class, `patience` steps
    are enough, and a norm below `rounding` counts as zero.
    """
    # Where no label counts that is the cause, and has a finding of its own: GS606.
    if window.unlabelled or not window.finite or window.step.skipped:
        return
    is_learning = bool(window.alive.any())
    cause = window.constant
    norms = window.norms
    if norms is None:
        is_zero = window.step.gradient == NO_GRADIENT
    else:
        is_rounding = cause is not None and max(window.first_totals, default=1.0) < rounding
        is_zero = window.total == 0 or (is_rounding and window.total < rounding)
        is_learning = is_learning and not is_rounding
    if not is_zero:
        return
    if window.loss == 0:
        is_early = cause is None and window.steps_seen <= zero_loss_steps - patience
        if is_learning or is_early:
            return
    evidence = "no parameter has a gradient"
    if norms is not None and len(norms.l2):
        amount = "exactly 0" if window.total == 0 else f"{window.total:.3g}, no more than rounding"
        evidence = f"the norm over {len(norms.l2)} parameters is {amount}"
    if is_learning:
        yield Fact(evidence)
        return
    if window.loss == 0:
        evidence += "; so is the loss"
    advice = _ADAPTERS if _has_only_zero_adapters(window) else None
    if cause is not None:
        evidence += f"; {cause}"
        advice = ONE_CLASS if cause.reason == "one class" else EQUAL
    yield Fact(evidence, first_step=window.first_step, advice=advice)


def _has_only_zero_adapters(window: Window) -> bool:
    """Whether all matrices that are trained are factors of adapters, and zero."""
    learning = [row for row in window.subject.matrices if window.subject.trainable[row]]
    return bool(learning) and all(
        window.started_at_zero[row] and is_of_an_adapter(window.subject.names[row])
        for row in learning
    )


_ADAPTERS = Advice(
    recommendation=(
        "Both factors of each adapter (LoRA) are zero, so neither gets a gradient: initialise one "
        "of them randomly (lora_A) and leave the other at zero (lora_B)."
    ),
    fix=START_ADAPTERS,
)
