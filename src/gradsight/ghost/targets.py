"""The validation targets and their gradients, the directions that samples are scored along."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from gradsight.core.beside import beside_training
from gradsight.core.shards import local_part
from gradsight.core.sharing import ModelGroup, without_reduction
from gradsight.errors import GradsightError, UsageError, in_one_line
from gradsight.ghost.arguments import calling_loss_fn
from gradsight.ghost.directions import Direction, cosine
from gradsight.ghost.gradients import gradients
from gradsight.ghost.parameters import ScoredParameters
from gradsight.measure.host_copy import HostCopy

LossFn = Callable[[Any, Any], Tensor]
"""From the model and a batch to the mean loss."""


@dataclass(frozen=True, slots=True)
class UnreadNorms:
    """The norms of a target's direction on their way from an accelerator."""

    target: str
    parameters: list[str]
    norms: HostCopy


def check_targets(targets: Mapping[str, Any], device: torch.device) -> None:
    """An error for targets without rows, or on another device than the model."""
    if not targets:
        raise UsageError("targets is empty: expected at least one validation batch")
    for name, batch in targets.items():
        tensors = [x for x in tree_flatten(batch)[0] if isinstance(x, Tensor)]
        sized = batch if tensors else ()
        if not tensors and hasattr(batch, "values"):  # a mapping that torch's trees do not open
            tensors = [x for x in dict(batch).values() if isinstance(x, Tensor)]
            sized = tensors
        if any(x.numel() == 0 for x in tensors) or (not tensors and not sized and _is_empty(batch)):
            raise UsageError(
                f"the validation data of target {name!r} is empty: expected at least one sample"
            )
        for x in tensors:
            if x.device != device:
                raise UsageError(
                    f"the validation data of target {name!r} is on {x.device}, the model on "
                    f"{device}. Move it there first: batch.to({str(device)!r})"
                )


def _is_empty(batch: Any) -> bool:
    return batch is None or (hasattr(batch, "__len__") and len(batch) == 0)


class Targets:
    """Validation batches by name, with the gradient of each one's mean loss."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, batches: Mapping[str, Any], group: ModelGroup
    ) -> None:
        self.batches = batches
        self.names = tuple(batches)
        self.directions: dict[str, Direction] = {}
        self.losses: dict[str, Tensor] = {}
        self._unread: list[UnreadNorms] = []
        self._model = model
        self._loss_fn = loss_fn
        self.group = group

    def refresh(
        self,
        parameters: ScoredParameters,
        scales: Direction | None = None,
        *,
        compare: bool = False,
    ) -> dict[str, Tensor]:
        """Compute every direction anew; with `compare`, returns its cosine with the old one."""
        turned: dict[str, Tensor] = {}
        for name, batch in self.batches.items():
            new, loss = self._gradient(name, batch, parameters)
            self.losses[name] = loss
            for parameter, scale in (scales or {}).items():
                if parameter in new:
                    new[parameter] = new[parameter] * scale
            self._refuse_nonfinite(name, new)
            old = self.directions.get(name)
            if compare and old is not None:
                turned[name] = cosine(old, new, self.group)
            self.directions[name] = new
        return turned

    def _gradient(
        self, name: str, batch: Any, parameters: ScoredParameters
    ) -> tuple[Direction, Tensor]:
        """The gradient of the target's mean loss, averaged over all processes, and that loss."""
        with beside_training(parameters.root, evaluating=True), without_reduction(self._model):
            # The whole direction first: then each use's dots hold every cross term of tied weights.
            with calling_loss_fn(f"on target {name!r}", batch):
                loss = self._loss_fn(self._model, batch)
            check_loss(loss, f"on target {name!r}")
            with _explained(name, parameters.root):
                direction, _ = gradients([loss], None, parameters.trainable, self.group.sharded)
        value = loss.detach().clone()
        if self.group.sharded:
            self.group.mean([value])  # fully_shard has averaged the gradient itself
            return direction, value
        if self.group.size > 1:
            # A parameter may be used on one process only; the message must be alike on all.
            named = parameters.trainable.items()
            direction = {n: direction.get(n, torch.zeros_like(p)) for n, p in named}
        self.group.mean([value, *direction.values()])
        return direction, value

    def _refuse_nonfinite(self, name: str, direction: Direction) -> None:
        """An error for a direction that is not finite.

        On an accelerator it comes one refresh later, so that nothing waits for the device.
        """
        if not direction:
            raise GradsightError(
                f"the loss of target {name!r} depends on no trainable parameter: it gives no "
                "direction"
            )
        for past in self._unread:
            _refuse_norms(past.target, past.parameters, past.norms)
        self._unread = []
        local = {n: local_part(d) for n, d in direction.items()}
        parts = {n: part for n, part in local.items() if part.numel()}
        each = torch._foreach_norm(list(parts.values()))
        norms = torch.stack([norm.float().to(self.group.device) for norm in each])
        if self.group.sharded:
            norms = self.group.sum(norms)
        copy = HostCopy.of(norms)
        if copy.is_from_device:
            self._unread.append(UnreadNorms(name, list(parts), copy))
        else:
            _refuse_norms(name, list(parts), copy)


@contextmanager
def _explained(target: str, root: nn.Module) -> Iterator[None]:
    """Explain a failed backward pass: users do not know that it ran in evaluation mode."""
    try:
        yield
    except (GradsightError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise GradsightError(
            f"backward failed on target {target!r}: {in_one_line(error)}. Gradsight runs the "
            f"validation pass in evaluation mode, and {type(root).__name__} may not support "
            "backward there. For a Hugging Face model, try use_cache=False. Models that support "
            "backward only in training mode, such as reversible networks, cannot be scored."
        ) from error


def _refuse_norms(target: str, names: list[str], norms: HostCopy) -> None:
    finite = np.isfinite(norms.read()).tolist()
    bad = [name for name, good in zip(names, finite, strict=True) if not good]
    if bad:
        raise GradsightError(
            f"the gradient of target {target!r} holds NaN or Inf (in {', '.join(bad[:3])}), so no "
            "sample can be scored along it. Look at the target's loss; training itself can go on "
            "without observe()."
        )


def check_loss(loss: Any, where: str) -> None:
    """An error unless a loss function returned a scalar that can be differentiated."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"a tensor of shape {tuple(loss.shape)}"
        raise UsageError(f"loss_fn must return a scalar mean loss, {where} it returned {got}")
    if not loss.requires_grad:
        raise UsageError(
            f"loss_fn's result {where} does not depend on the model's parameters, or gradients are "
            "switched off"
        )
