"""The loss of one batch, run beside training: what was seen of it, and its gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core.autocast import current_autocast
from gradsight.core.beside import called_modules, replaying
from gradsight.core.calls import RecordedCall
from gradsight.core.guard import Guard
from gradsight.core.hooks import put_module_hook
from gradsight.core.parameters import unwrapped
from gradsight.core.random_state import torch_states
from gradsight.errors import UsageError, UserCodeError
from gradsight.first_step.aside import AsideOptions, left_out, look_aside
from gradsight.first_step.labels import LabelLook, look_at_labels
from gradsight.first_step.modes import evaluating_parts
from gradsight.first_step.operations import Operations
from gradsight.first_step.recorder import SeenCall, SeenPass
from gradsight.values.first_step import FirstStep


@dataclass(frozen=True, eq=False, slots=True)
class BatchLook:
    """What one batch tells."""

    first: FirstStep
    evaluating: tuple[tuple[str, str], ...]
    loss: float
    gradients: tuple[Tensor | None, ...]
    """Of the parameters that were given, in their order."""


def look_at_batch(
    model: nn.Module, batch: Any, loss_fn: Any, parameters: Sequence[Tensor]
) -> BatchLook:
    """Run loss_fn(model, batch) and its backward aside, and the model again by itself."""
    inner = unwrapped(model)
    guard = Guard(None, "preflight", "the batch could not be examined")
    calls = _Calls(guard)
    operations = Operations(guard)
    try:
        calls.start(inner)
        with replaying(inner, _blank(inner)):
            with operations:
                loss = _loss(inner, batch, loss_fn)
            trainable = [each for each in parameters if each.requires_grad]
            found = iter(torch.autograd.grad(loss, trainable, allow_unused=True))
    finally:
        guard.close()
    gradients = tuple(next(found) if each.requires_grad else None for each in parameters)
    pairs = zip(parameters, gradients, strict=True)
    learning = {id(parameter) for parameter, gradient in pairs if gradient is not None}
    seen = SeenPass(
        tuple(calls.seen),
        tuple(operations.looked_up),
        tuple(operations.targets),
        tuple(operations.fed),
        tuple(operations.labels),
        operations.constant,
        tuple(operations.padded),
    )
    first = _aside(seen)
    of_labels = look_at_labels(seen) or LabelLook()
    return BatchLook(
        replace(
            first,
            fed=seen.fed,
            labels=seen.labels,
            **of_labels.findings(),
            left_out=(*first.left_out, *of_labels.left_out),
        ),
        tuple(evaluating_parts(inner, learning).items()),
        float(loss.detach()),
        gradients,
    )


def _aside(seen: SeenPass) -> FirstStep:
    if not seen.calls:
        return left_out("loss_fn does not call the model")
    sizes = [sum(1 for _ in call.module.parameters()) for call in seen.calls]
    call = seen.calls[sizes.index(max(sizes))]
    if not call.is_unchanged():
        return left_out("the batch was changed in place after the model had seen it")
    return look_aside(call.module, call.made, seen, AsideOptions())


def _blank(model: nn.Module) -> RecordedCall:
    """The circumstances as they are now."""
    rng = torch_states()
    return RecordedCall((), {}, rng, {}, current_autocast(), model.training, None)


def _loss(model: nn.Module, batch: Any, loss_fn: Any) -> Tensor:
    try:
        loss = loss_fn(model, batch)
    except UsageError:
        raise
    except Exception as error:
        text = f"loss_fn(model, batch) raised {type(error).__name__}: {error}"
        raise UserCodeError(f"{text}. Try it by itself first") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            "loss_fn(model, batch) must return a tensor with one element, got "
            f"{type(loss).__name__}"
        )
    if not loss.requires_grad:
        raise UsageError(
            "the loss has no gradient: nothing that it was computed from requires one. Compute it "
            "from the model's output, without torch.no_grad(), detach() or .item()"
        )
    return loss.sum()


class _Calls:
    """Notes the outermost calls of a model and of its parts."""

    def __init__(self, guard: Guard) -> None:
        self.seen: list[SeenCall] = []
        self._guard = guard
        self._open: nn.Module | None = None

    def start(self, root: nn.Module) -> None:
        """Until the guard is closed."""
        for module in called_modules(root):
            before = partial(self._before, module)
            after = partial(self._after, module)
            register = module.register_forward_pre_hook
            put_module_hook(self._guard, register, before, with_kwargs=True)
            put_module_hook(self._guard, module.register_forward_hook, after, always_call=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._open is None and torch.is_grad_enabled():
            self._open = module
            self.seen.append(SeenCall.of(module, args, kwargs, perf_counter()))

    def _after(self, module: nn.Module, *_: Any) -> None:
        if self._open is module:
            self._open = None
