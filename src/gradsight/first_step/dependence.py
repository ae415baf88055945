"""Whether what a model gives depends on what it is given."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradsight.core.beside import copied_arguments
from gradsight.core.calls import RecordedCall
from gradsight.core.random_state import set_torch_states
from gradsight.core.samples import tensors_in
from gradsight.first_step.documents import named_arguments
from gradsight.first_step.leaks import gradients

_NOT_THE_INPUT = ("label", "target", "mask", "position", "weight", "edge", "adj", "index", "length")
"""Parts of the names of arguments that say how the input is to be used."""
_FEW = 16


def is_input(name: str) -> bool:
    """Whether an argument of this name is an input, not a label or something that goes with one."""
    return not any(part in name.lower() for part in _NOT_THE_INPUT)


def depends_on_input(
    module: nn.Module,
    call: RecordedCall,
    outputs: Sequence[Tensor],
    probes: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> tuple[bool | None, str]:
    """Whether the outputs change with the input, and else why not; None where it is in doubt.

    To be asked where the call can be made again.
    """
    tensors = tensors_in(*call.args, *call.kwargs.values())
    given = [each for each in tensors if each.layout is torch.strided and each.numel() > _FEW]
    reals = [each for each in given if each.is_floating_point()]
    if reals and len(reals) == len(given) and not any(bool(each.any()) for each in reals):
        return False, "the model is given nothing but zeros"
    summed = torch.zeros(())
    for output in outputs:
        summed = summed + (output.float() * torch.randn_like(output.float())).sum().cpu()
    if any(bool(gradient.any()) for gradient in gradients(summed, probes)):
        return True, ""
    changed = _changed(module, call, targets)
    if changed is None:
        return None, ""
    set_torch_states(call.rng)
    with torch.no_grad():
        before = _given(module, call)
        set_torch_states(call.rng)
        after = _given(module, changed)
    if not before or len(before) != len(after):
        return None, ""
    pairs = list(zip(before, after, strict=True))
    if any(one.shape != other.shape or not torch.equal(one, other) for one, other in pairs):
        return True, ""
    if any(not bool(torch.isfinite(one).all()) for one in before):
        return None, ""
    return False, "with another input the model gives exactly the same"


def _given(module: nn.Module, call: RecordedCall) -> list[Tensor]:
    args, kwargs = copied_arguments(call)
    found = tensors_in(module(*args, **kwargs))
    return [each for each in found if each.is_floating_point() and each.layout is torch.strided]


def _changed(
    module: nn.Module, call: RecordedCall, targets: Sequence[Tensor]
) -> RecordedCall | None:
    """The same call with another input; None where none can be told from what goes with it."""
    kept = {
        id(value) for name, value in named_arguments(module, call).items() if not is_input(name)
    }
    flat, spec = tree_flatten((tuple(call.args), dict(call.kwargs)))
    was_changed = False
    for place, value in enumerate(flat):
        if not isinstance(value, Tensor) or id(value) in kept:
            continue
        if value.layout is not torch.strided or value.numel() < 2:
            continue
        is_first = not was_changed
        if not is_first and any(_same(value, target) for target in targets):
            continue
        other = _another(value)
        if other is not None:
            flat[place] = other
            was_changed = True
    if not was_changed:
        return None
    args, kwargs = tree_unflatten(flat, spec)
    return RecordedCall(args, kwargs, call.rng, {}, call.autocast, call.training, call.caller)


def _same(value: Tensor, target: Tensor) -> bool:
    return value.numel() == target.numel() and torch.equal(value.flatten(), target.flatten())


def _another(value: Tensor) -> Tensor | None:
    """Other values of the same kind; None where there is none."""
    if value.is_floating_point():
        return value.detach() * -0.7 + torch.randn_like(value.float()).to(value)
    if value.dtype is torch.bool:
        return None
    rolled = value.flatten().roll(1).reshape(value.shape)
    return None if torch.equal(rolled, value) else rolled
