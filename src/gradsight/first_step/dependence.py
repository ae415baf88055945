"""Whether what a model gives depends on what it is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
_MOST_LAYERS = 2000


@dataclass(frozen=True, slots=True)
class Dependence:
    """Whether what a model gives depends on what it is given."""

    depends: bool | None = None
    """None where it is in doubt."""
    why_not: str = ""
    dead_layer: str = ""
    """The layer whose units are all dead; empty: there is none."""


class _Layers:
    """Records in one call what every layer is given and what it returns."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._handles: list[Any] = []
        self.seen: list[tuple[str, Tensor]] = []
        """In order: the layer that returned these values, or else an empty name."""

    def __enter__(self) -> None:
        for name, each in self._module.named_modules():
            if next(each.children(), None) is None:
                has_weights = next(each.parameters(recurse=False), None) is not None
                given, returned = partial(self._note, ""), partial(self._note, name * has_weights)
                self._handles.append(each.register_forward_pre_hook(given))
                self._handles.append(each.register_forward_hook(returned))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, name: str, module: nn.Module, *values: object) -> None:
        tensors = [each for each in tensors_in(values[-1]) if each.is_floating_point()]
        if tensors and len(self.seen) < _MOST_LAYERS:
            self.seen.append((name, tensors[0].detach().clone()))


def _dead_layer(module: nn.Module, call: RecordedCall, changed: RecordedCall) -> str:
    """Return the layer whose units are all dead; empty where the input is lost in another way.

    It is the last layer that the input reaches; what it returns is never above zero, and the
    next layer is given nothing but zeros.
    """
    seen = []
    for each in (call, changed):
        layers = _Layers(module)
        set_torch_states(call.rng)
        with torch.no_grad(), layers:
            _given(module, each)
        seen.append(layers.seen)
    layer = ""
    is_positive = True
    for (name, one), (other_name, other) in zip(*seen, strict=False):
        if name != other_name or one.shape != other.shape:
            return ""
        if not torch.equal(one, other):
            layer = name or layer
            is_positive = bool((one > 0).any()) or bool((other > 0).any())
        elif layer:
            return "" if is_positive or bool(one.any()) else layer
    return ""


def is_input(name: str) -> bool:
    """Whether an argument of this name is an input, not a label or something that goes with one."""
    return not any(part in name.lower() for part in _NOT_THE_INPUT)


def depends_on_input(
    module: nn.Module,
    call: RecordedCall,
    outputs: Sequence[Tensor],
    probes: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> Dependence:
    """Whether the outputs change with the input, and else why not.

    To be asked where the call can be made again.
    """
    tensors = tensors_in(*call.args, *call.kwargs.values())
    given = [each for each in tensors if each.layout is torch.strided and each.numel() > _FEW]
    reals = [each for each in given if each.is_floating_point()]
    if reals and len(reals) == len(given) and not any(bool(each.any()) for each in reals):
        return Dependence(False, "the model is given nothing but zeros")
    summed = torch.zeros(())
    for output in outputs:
        summed = summed + (output.float() * torch.randn_like(output.float())).sum().cpu()
    if any(bool(gradient.any()) for gradient in gradients(summed, probes)):
        return Dependence(True)
    changed = _changed(module, call, targets)
    if changed is None:
        return Dependence()
    set_torch_states(call.rng)
    with torch.no_grad():
        before = _given(module, call)
        set_torch_states(call.rng)
        after = _given(module, changed)
    if not before or len(before) != len(after):
        return Dependence()
    pairs = list(zip(before, after, strict=True))
    if any(one.shape != other.shape or not torch.equal(one, other) for one, other in pairs):
        return Dependence(True)
    if any(not bool(torch.isfinite(one).all()) for one in before):
        return Dependence()
    text = "with another input the model returns exactly the same output"
    dead = _dead_layer(module, call, changed)
    if dead:
        text = f"all units of layer {dead} are dead, so {text}"
    return Dependence(False, text, dead)


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
