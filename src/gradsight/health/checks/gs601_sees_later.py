"""GS601: a position that sees later ones."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.first_step import CULPRITS, Leak

_WHY = (
    "The output at a position depends on inputs that come after it, and its target is one of "
    "them: the loss falls, but the model does not learn to generate. "
)
_MASKED = Advice(
    recommendation=_WHY
    + (
        "Give attention a mask that hides later positions. A float mask is added to the scores: "
        "-inf hides and 0 shows. Take care with a bool mask: True shows a position in "
        "F.scaled_dot_product_attention, and hides it in nn.MultiheadAttention and nn.Transformer."
    ),
    fix="""
# in the model: a mask that hides later positions
# (-inf above the diagonal, which is added to the scores: it is right for
# nn.MultiheadAttention as attn_mask and nn.Transformer as tgt_mask too)
def causal_mask(length):
    return nn.Transformer.generate_square_subsequent_mask(length)

def attend(query, key, value):    # [rows, heads, time, width]
    attention = F.scaled_dot_product_attention
    mask = causal_mask(query.shape[-2]).to(query)
    return attention(query, key, value, attn_mask=mask)
""",
)
_FIND = """
# before the loop: list the layers whose earlier outputs change
# with the last input (they must not)
def layers_that_see_later(model, inputs):    # inputs: [rows, time, ...]
    outputs = {}
    def keep(name):
        def hook(module, args, output):
            output = output[0] if isinstance(output, tuple) else output
            outputs.setdefault(name, []).append(output)
        return hook
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_hook(keep(name)))
    changed = inputs.clone()
    changed[:, -1] = inputs[:, -1].roll(1, 0)
    model.eval()
    with torch.no_grad():
        model(inputs)
        model(changed)
    model.train()
    for hook in hooks:
        hook.remove()
    for name, (one, other, *_) in outputs.items():
        if torch.is_tensor(one) and one.dim() > 2:
            if not torch.allclose(one[:, :-1], other[:, :-1]):
                print(f"{name or 'the model'} sees later positions")

layers_that_see_later(model, next(iter(loader))[0])
"""
_ADVICE = {
    "added mask": _MASKED,
    "inverted mask": _MASKED,
    "attention": _MASKED,
    "recurrence": Advice(
        _WHY + "Make the recurrent layer run forward only, with bidirectional=False.", _FIND
    ),
    "convolution": Advice(
        _WHY + "Pad the convolution on the left only: F.pad(x, (reach, 0)) with padding=0.", _FIND
    ),
}


@check(
    "GS601",
    "a position sees later ones",
    "critical",
    asked=Asked(when="first", needs=("first step",)),
    advice=Advice(
        recommendation=_WHY
        + (
            "Mask attention, run recurrent layers forward only, pad convolutions on the left "
            "only, and normalise over features, not over time."
        ),
        fix=_FIND,
    ),
)
def sees_later(window: Window, *, ratio: float = 1e-3) -> Iterator[Fact]:
    """A position sees later positions, and its target is one of them.

    Why: the model sees the answer in its input. The loss is too low, often by a few percent only,
    and the model fails when it generates. This is judged where targets are the inputs moved ahead.
    A position sees a later one if its output has a gradient at that later input, and the gradient
    is more than `ratio` times the largest one at earlier inputs.
    """
    first = window.now.signals.first
    leak = None if first is None else first.positions
    if leak is not None and leak.ratio > ratio:
        yield Fact(_evidence(leak, ratio), advice=_ADVICE.get(leak.culprit))


def _evidence(leak: Leak, limit: float) -> str:
    size = f"{leak.ratio:.2g} times the largest one at earlier inputs"
    if leak.ratio > 1e6:
        size = "the only one: earlier inputs have none"
    text = f"{leak.example}. That gradient is {size}; the limit is {limit:g}"
    if leak.culprit:
        text += f". The cause: {CULPRITS[leak.culprit]}"
    return text
