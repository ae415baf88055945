"""GS607: a loss that does not depend on the input."""

from collections.abc import Iterator

from gradsight.health.checks.gs205_dead_units import is_named
from gradsight.health.fixes import LIVING_UNITS
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.adapters import layer_of


@check(
    "GS607",
    "the loss does not depend on the input",
    "critical",
    asked=Asked(when="first", needs=("first step",)),
    advice=Advice(
        recommendation=(
            "What the model gives is the same whatever it is given: look for a variable that "
            "is overwritten, a factor of zero, detach(), or inputs that are all the same "
            "after preprocessing."
        ),
        fix="""
# before the loop: find the first layer that ignores its input
outputs = {}
def record(module, args, output):
    outputs.setdefault(module, []).append(output)

handles = [each.register_forward_hook(record) for each in model.modules()]
was_training = model.training
model.eval()
with torch.no_grad():
    model(inputs), model(torch.zeros_like(inputs))
model.train(was_training)
for handle in handles:
    handle.remove()
for name, module in list(model.named_modules())[1:]:
    # the outputs for one input, then for the other
    seen = outputs.get(module, [None])
    one, other = seen[0], seen[len(seen) // 2]
    if isinstance(one, torch.Tensor) and torch.equal(one, other):
        print(f"Does not depend on the input: {name}")
""",
    ),
)
def input_ignored(window: Window) -> Iterator[Fact]:
    """What the model gives does not depend on its input.

    Why: it can learn nothing but how often each answer occurs. Asked of a pass aside, in which
    weights that start at zero are random.
    """
    first = window.now.signals.first
    if first is None or first.depends is not False:
        return
    text = first.independence or "no gradient comes back to the input"
    if first.constant is not None and first.constant.reason == "one class":
        text += f"; {first.constant}"
    if not first.dead_layer:
        yield Fact(text)
        return
    names = window.subject.names
    dead = [row for row, name in enumerate(names) if is_named(layer_of(name), first.dead_layer)]
    yield Fact(text, window.named(dead), advice=_DEAD_UNITS)


_DEAD_UNITS = Advice(
    recommendation=(
        "All units of this layer are dead: their activation gives zero for every sample, so "
        "nothing of the input gets through. Use LeakyReLU or GELU instead of ReLU, and check the "
        "layer's biases, its initialisation and the size of its inputs."
    ),
    fix=LIVING_UNITS,
)
