"""GS307: adapters that are frozen."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS307",
    "adapters are frozen",
    "warning",
    asked=Asked(
        when="stretch", needs=("norms",), gate=lambda window: bool(window.subject.frozen_adapters)
    ),
    advice=Advice(
        recommendation=(
            "The model has adapters (such as LoRA), and none of them is trained. Load them with "
            "PeftModel.from_pretrained(model, path, is_trainable=True), and leave requires_grad "
            "of the adapters alone when you freeze the rest."
        ),
        fix="""
# before the loop, and before the optimizer is made: train adapters
for name, parameter in model.named_parameters():
    if "lora_" in name:
        parameter.requires_grad_(True)
""",
    ),
)
def frozen_adapters(window: Window, *, steps: int = 10) -> Iterator[Fact]:
    """Something in the model is trained, but none of its adapters is.

    Why: most of what should learn does not change, and training looks normal. Three cases are not
    reported: a model with at least one trained adapter, a model that is frozen as a whole (it may
    be a reference or a teacher), and adapters that are merged, switched off, or in a layer that is
    itself trained.
    """
    subject = window.subject
    if window.steps_seen < steps or not subject.frozen_adapters:
        return
    names = window.named(subject.frozen_adapters)
    learning = [
        name for name, learns in zip(subject.names, subject.trainable, strict=True) if learns
    ]
    more = f" and {len(learning) - 2} more" if len(learning) > 2 else ""
    yield Fact(
        f"{len(names)} parameters of adapters have requires_grad=False; the trained parameters "
        f"are {', '.join(learning[:2])}{more}",
        names,
        first_step=window.first_step,
    )
