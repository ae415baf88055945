"""The loss that a step minimises, heard where it is always told: at backward.

Trainers divide the loss of a micro-batch before backward: by the micro-batches, or by all tokens of
the step. Whatever they divide by, the step minimises the sum of what its backward passes start
from; over ranks, the mean of these sums, as gradients are averaged.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsight.core import moments
from gradsight.core.group import LeavingProblems, ProcessGroup
from gradsight.core.guard import Guard
from gradsight.core.hooks import put_hook
from gradsight.core.meeting import RanksMissing
from gradsight.core.optimizers import innermost_optimizer
from gradsight.core.passes import BackwardPass, GradientState, gradient_state, is_same
from gradsight.core.shards import are_spread, local_part
from gradsight.core.sharing import reduces_gradients
from gradsight.session.watch_session import Watch


class StepLoss:
    """Tells a watch the loss of each of its steps. Nothing waits for the device."""

    def __init__(self, watch: Watch, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._watch = watch
        self._model = model
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._optimizers = [innermost_optimizer(optimizer) for optimizer in optimizers]
        self._group = loss_group(model, watch)
        leaving = LeavingProblems(watch.problems, [self._group])
        self._guard = Guard(leaving, "loss", "the loss is no longer recorded")
        self._evaluations: int | None = None  # of the closure that an optimizer is stepping with
        self._scaler: torch.amp.GradScaler | None = None
        self._scaled_at = -1
        self._used_in_backward = False
        self._is_spread = are_spread(self._parameters)
        self._step = -1
        self._sum: Tensor | None = None
        """Of the backward passes of this step so far."""
        self._done: set[int] = set()
        """The optimizers that have made their part of this step."""
        self._stepping: int | None = None
        self._pending: Tensor | None = None
        """Of the passes since one of them has: the optimizer that steps next tells whose it is."""
        self._loss: Tensor | None = None
        """Of the backward pass that is running."""
        self._left: list[GradientState | None] = []
        """The gradients before it."""

    def start(self) -> None:
        """Begin to listen; after the watch, which is asked for the step."""
        self._guard.at_end(self._group.close)
        moments.listen(self, self._guard)
        for optimizer in self._optimizers:
            put_hook(self._guard, optimizer.register_step_pre_hook, self._step_begins)
            put_hook(self._guard, optimizer.register_step_post_hook, self._step_ends)

    def stop(self) -> None:
        """Leave everything as it was found."""
        self._guard.close()

    # What torch tells.

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """The backward passes of this step start from losses times this scaler's factor."""
        self._scaler = scaler
        self._scaled_at = self._watch.step_under_way

    def before_backward(self, begun: BackwardPass) -> None:
        """A backward pass begins."""
        self._loss = None
        self._used_in_backward = False
        if self._evaluations is not None:
            self._evaluations += 1
            # LBFGS evaluates its closure many times a step; the step starts from the first.
            if self._evaluations > 1:
                return
        self._loss = _total(begun.tensors)
        self._left = [gradient_state(parameter.grad) for parameter in self._parameters]

    def after_backward(self, begun: BackwardPass, rows: Sequence[int]) -> None:
        """It has returned: the watch is told the sum so far."""
        if self._loss is None or not self._is_of_the_model():
            return
        loss = self._loss
        step = self._watch.step_under_way
        if self._scaler is not None and self._scaled_at == step:
            loss = loss / _factor(self._scaler, loss)
        if step != self._step:
            self._begin(step)
        if not self._is_of_this_step():
            self._pending = _added(self._pending, loss)
            return
        self._sum = _added(self._sum, loss)
        self._watch.log(loss=self._told())

    def _is_of_this_step(self) -> bool:
        """Whether a pass belongs to the step under way for sure.

        Where an optimizer has stepped and another has not, that one may do so now; but where the
        first steps again, the watch begins another step.
        """
        if not self._done or self._used_in_backward:
            return True
        return self._stepping is not None and self._stepping not in self._done

    def _begin(self, step: int) -> None:
        self._step = step
        self._sum = None
        self._pending = None
        self._done.clear()

    def _told(self) -> Tensor | None:
        """The loss so far, over all ranks."""
        if self._sum is None or self._group.size == 1 or not reduces_gradients(self._model):
            return self._sum
        return self._group.sum(self._sum) / self._group.size

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        self._evaluations = 0
        self._stepping = id(optimizer)
        if self._stepping not in self._done:
            self._settle()

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        self._evaluations = None
        self._stepping = None
        self._used_in_backward |= moments.inside_backward()
        # It has stepped a second time: by now the watch has begun another step.
        self._settle()
        self._done.add(id(optimizer))

    def _settle(self) -> None:
        """What was pending is of the step under way."""
        pending = self._pending
        if pending is None:
            return
        if self._watch.step_under_way != self._step:
            self._begin(self._watch.step_under_way)
        self._pending = None
        self._sum = _added(self._sum, pending)
        # Not `log`: the pass has run before the watch began the step.
        self._watch.log_under_way(loss=self._told())

    def _is_of_the_model(self) -> bool:
        """Whether this pass has touched a gradient of the model; a GAN trains another beside it."""
        before = zip(self._parameters, self._left, strict=True)
        if self._used_in_backward or any(not is_same(each.grad, state) for each, state in before):
            return True
        # FSDP2 keeps gradients to itself until the last micro-batch.
        return self._is_spread and all(each.grad is None for each in self._parameters)


def loss_group(model: nn.Module, watch: Watch) -> ProcessGroup:
    """The ranks whose losses make one: those that share the model, if all have come."""
    parameters = list(model.parameters())
    replicated = any(isinstance(each, DistributedDataParallel) for each in model.modules())
    shared = replicated or are_spread(parameters)
    device = parameters[0].device if parameters else None
    try:
        return ProcessGroup(
            "loss",
            backend=None,
            device=device,
            timeout=None,
            alone=not shared or watch.is_incomplete,
        )
    except RanksMissing:
        return ProcessGroup(alone=True)


def _added(total: Tensor | None, loss: Tensor) -> Tensor:
    return loss if total is None else total + loss


def _total(tensors: Any) -> Tensor | None:
    """The sum of the losses; None where a root is no single number."""
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
    if not roots or any(not isinstance(root, Tensor) or root.numel() != 1 for root in roots):
        return None
    # A copy: whoever has the loss may change it in place before the step is over.
    losses = [local_part(root.detach()).reshape(()).clone() for root in roots]
    wide = [loss.to(torch.promote_types(loss.dtype, torch.float32)) for loss in losses]
    total = wide[0]
    for loss in wide[1:]:
        total = total + loss
    return total


def _factor(scaler: torch.amp.GradScaler, loss: Tensor) -> Tensor | float:
    # Not get_scale(): it reads the number on the host, and so waits for the device.
    factor = getattr(scaler, "_scale", None)
    if isinstance(factor, Tensor):
        return factor.detach().to(loss.device)
    return scaler.get_scale()
