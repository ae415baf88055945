"""GS304: parameters that do not change."""

from collections.abc import Iterator

import numpy as np

from gradsight.judge.registry import Fact, check
from gradsight.judge.window import Window


@check(
    "GS304",
    "does not change",
    "warning",
    when="look",
    needs=("closer", "optimizer"),
    recommendation=(
        "They have a gradient and an optimizer, but their values stay the same: check the learning rate of their "
        "group, a copy that the optimizer holds instead, or bf16 weights that round small updates away."
    ),
    fix="""
for number, group in enumerate(optimizer.param_groups):
    print(number, group["lr"], sum(p.numel() for p in group["params"]))

# bf16 weights: keep a float32 copy for the optimizer, or use autocast
with torch.autocast(device, dtype=torch.bfloat16):
    loss = model(x)
""",
)
def unchanged(window: Window, *, looks: int = 3) -> Iterator[Fact]:
    """Parameters do not change although they get a gradient.

    Why: frozen by mistake: a learning rate of zero, or updates lost in rounding, look like training and are none.
    """
    if len(window.closers) < looks or window.looks_taken < looks + 1 or window.now.step.skipped or window.converging:
        return
    recent = list(window.closers)[-looks:]
    if window.now.step.lr == 0 and not any((look.update_ratio > 0).any() for look in recent):
        return  # a learning rate of zero for everything: a warm-up's first step, or the end of a decay
    still = np.all([look.update_ratio == 0 for look in recent], axis=0) & (window.l2 > 0)
    held = np.array(window.subject.memberships or [0] * len(still)) > 0
    rows = np.flatnonzero(still & held)
    if len(rows):
        text = f"the same before and after the steps {', '.join(str(look.step) for look in recent)}"
        yield Fact(text, window.named(rows), first_step=recent[0].step)
