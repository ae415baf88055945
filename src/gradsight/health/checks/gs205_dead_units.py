"""GS205: dead units."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.fixes import LIST_ADAPTERS, LIVING_UNITS, LOWER_RATE, PRINT_DEAD_UNITS
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.adapters import is_of_an_adapter, layer_of

_SHOWN = 6
_CONVOLUTIONS = ("Conv", "Parametrized")


@check(
    "GS205",
    "dead units",
    "warning",
    asked=Asked(when="look", needs=("details",)),
    advice=Advice(
        recommendation=(
            "Units that never get a gradient do not come back by themselves. Use LeakyReLU or "
            "GELU instead of ReLU, lower the learning rate, and check for large negative biases. "
            "The weights of the other units can stay as they are."
        ),
        fix=LIVING_UNITS + LOWER_RATE,
    ),
)
def dead_units(window: Window, *, share: float = 0.7, looks: int = 4) -> Iterator[Fact]:
    """Most units of a layer got no gradient in any of the last measured steps.

    A unit is one output of a layer: a row of its weight, or an output channel of a convolution.

    Why: a unit whose row has a gradient of zero for every sample learns nothing, and its capacity
    is lost. A few dead units are ordinary, and so are lookup tables whose rows are not in the
    batch. A layer that gets only zeros from a dead layer before it is not counted. The finding is
    critical if all units of a layer are dead, so that the output does not depend on the input.
    """
    # While a margin is kept the whole gradient is zero, and every unit looks dead.
    if window.details_taken < looks or window.total == 0:
        return
    if window.input_ignored and not window.dead_layer:
        return  # GS607 found another reason
    dead = window.details[-1]["dead_share"]
    # 70% is AUTOTRAINER's limit; SageMaker Debugger's 50% was tried first.
    with np.errstate(invalid="ignore"):
        rows = np.flatnonzero(dead > share).tolist()
    # Layers of zeros are an initialisation, which GS107 explains.
    rows = [row for row in rows if not window.started_at_zero[row]]
    rows = [row for row in rows if not _is_explained_elsewhere(window, row)]
    if not rows:
        return
    for row in rows:
        window.dead_shares[row] = float(dead[row])
    named = [window.subject.names[row] for row in window.dead_shares]
    text = f"no gradient in the last {looks} measured steps: {_in_words(window)}"
    yield Fact(
        text,
        window.named(list(window.dead_shares)),
        "critical" if window.dead_layer else None,
        window.details[0].step,
        _advice(window, named),
    )


def _in_words(window: Window) -> str:
    """The share of dead units of every layer, the largest first."""
    names, shapes = window.subject.names, window.subject.shapes
    # weight_norm keeps two weights of the same units.
    layers: dict[str, tuple[float, int]] = {}
    for row, share in window.dead_shares.items():
        name = layer_of(names[row]) or names[row]
        layers[name] = max(layers.get(name, (0.0, 0)), (share, shapes[row][0]))
    ranked = sorted(layers.items(), key=lambda each: -each[1][0])
    shown = [f"{name}: {share:.0%} of {size} units" for name, (share, size) in ranked[:_SHOWN]]
    if len(ranked) > _SHOWN:
        least = ranked[-1][1][0]
        shown.append(f"and {len(ranked) - _SHOWN} more layers with at least {least:.0%}")
    return ", ".join(shown)


def _is_explained_elsewhere(window: Window, row: int) -> bool:
    """Whether its gradient is zero although its units are not dead.

    Its bias learns, so its input is all zeros; or all of it never learned anything, and no layer is
    seen that gets zeros from it: it may be multiplied by zero, and GS301 reports it.
    """
    subject = window.subject
    layer = layer_of(subject.names[row])
    same = [
        other
        for other, name in enumerate(subject.names)
        if other != row and layer_of(name) == layer and len(subject.shapes[other]) < 2
    ]
    if window.alive[row] or is_of_an_adapter(subject.names[row]):
        return False
    if any(window.alive[other] for other in same):
        return True
    if window.dead_layer:
        return not is_named(layer, window.dead_layer)
    held = subject.memberships is not None and subject.memberships[row] > 0
    return held and not _gets_zeros(window)


def _gets_zeros(window: Window) -> bool:
    """Whether some layer's weight never had a gradient while its bias learns."""
    weights, biases = set(), set()
    for row, name in enumerate(window.subject.names):
        if name.endswith("bias") and window.alive[row]:
            biases.add(layer_of(name))
        elif window.received[row] and not window.alive[row]:
            weights.add(layer_of(name))
    return bool(weights & biases)


def is_named(layer: str, name: str) -> bool:
    """Whether this layer of the watched model has this name in the module that was called."""
    return bool(name) and f".{layer}".endswith(f".{name}")


def _advice(window: Window, names: list[str]) -> Advice | None:
    if all(is_of_an_adapter(name) for name in names):
        return _OF_ADAPTERS
    kinds = {window.subject.kinds[row] for row in window.dead_shares}
    if not any(kind.startswith(("Linear", *_CONVOLUTIONS)) for kind in kinds):
        return _OF_OTHER_LAYERS
    return None


_OF_ADAPTERS = Advice(
    recommendation=(
        "These are factors of adapters, and a factor gets no gradient while its partner is zero. "
        "Check that the partner (lora_B for lora_A) is trained and is in the optimizer, and that "
        "only one of the two starts at zero."
    ),
    fix=LIST_ADAPTERS,
)
_OF_OTHER_LAYERS = Advice(
    recommendation=(
        "Nothing that these rows of the weights compute reaches the loss. Check for a mask, a "
        "slice or a factor of zero behind the layer, and for activations that are saturated or "
        "zero."
    ),
    fix=PRINT_DEAD_UNITS,
)
