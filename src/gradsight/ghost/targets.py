"""The validation targets and their gradients, the directions that samples are scored along."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from gradsight.core.distributed import local_part
from gradsight.core.sharing import Ranks, without_reduction
from gradsight.errors import GradsightError, UsageError
from gradsight.ghost.gradients import dot, gradients
from gradsight.ghost.gram import FactorBook, FactorRecorder
from gradsight.ghost.parameters import Parameters
from gradsight.ghost.passes import aside, eager, is_compiled

LossFn = Callable[[Any, Any], Tensor]
Direction = dict[str, Tensor]
"""A vector in parameter space, by parameter name; a name that is missing stands for zeros."""


@dataclass(frozen=True, slots=True)
class Staleness:
    """How far a direction had turned when it was refreshed."""

    step: int
    target: str
    cosine: float


def check_targets(targets: Mapping[str, Any], device: torch.device) -> None:
    """An error for targets without rows, or on another device than the model."""
    if not targets:
        raise UsageError("targets is empty: expected at least one validation batch")
    for name, batch in targets.items():
        tensors = [x for x in tree_flatten(batch)[0] if isinstance(x, Tensor)]
        sized = batch if tensors else ()
        if not tensors and hasattr(batch, "values"):
            tensors = [x for x in dict(batch).values() if isinstance(x, Tensor)]
            sized = tensors
        if any(x.numel() == 0 for x in tensors) or (not tensors and not sized and _is_empty(batch)):
            raise UsageError(
                f"the validation data of target {name!r} is empty: expected at least one sample"
            )
        for x in tensors:
            if x.device != device:
                raise UsageError(
                    f"the validation data of target {name!r} is on {x.device}, the model on {device}. "
                    f"Move it there first: batch.to({str(device)!r})"
                )


def _is_empty(batch: Any) -> bool:
    return batch is None or (hasattr(batch, "__len__") and len(batch) == 0)


class Targets:
    """Validation batches by name, with the gradient of each one's mean loss."""

    def __init__(
        self,
        model: nn.Module,
        root: nn.Module,
        loss_fn: LossFn,
        batches: Mapping[str, Any],
        ranks: Ranks,
    ) -> None:
        self.names = tuple(batches)
        self.directions: dict[str, Direction] = {}
        self.losses: dict[str, Tensor] = {}
        self.factors = FactorBook()
        self._without_factors: set[str] = set()
        """Targets too large for the Gram route in every layer: their factors are not looked for
        again.
        """
        self._unread: list[tuple[str, list[str], Tensor, Any]] = []
        self._model, self._root, self._loss_fn, self._batches, self._ranks = (
            model,
            root,
            loss_fn,
            batches,
            ranks,
        )

    def refresh(
        self, parameters: Parameters, scales: Direction | None = None, compare: bool = False
    ) -> dict[str, Tensor]:
        """Compute every target's direction anew; with `compare` returns the cosine with the old
        one, where there was one.
        """
        turned: dict[str, Tensor] = {}
        for name, batch in self._batches.items():
            new, self.losses[name] = self._gradient(
                name, batch, parameters, keep_factors=scales is None
            )
            for parameter, scale in (scales or {}).items():
                if parameter in new:
                    new[parameter] = new[parameter] * scale
            self._refuse_nonfinite(name, new)
            old = self.directions.get(name) if compare else None
            if old is not None:
                turned[name] = cosine(old, new, self._ranks)
            self.directions[name] = new
        return turned

    def set(self, name: str, direction: Direction, loss: Tensor) -> None:
        """Take a direction that was found elsewhere."""
        self._refuse_nonfinite(name, direction)
        self.directions[name] = direction
        self.factors.take(name, {}, direction)
        self.losses[name] = loss

    def _gradient(
        self, name: str, batch: Any, parameters: Parameters, keep_factors: bool
    ) -> tuple[Direction, Tensor]:
        """The gradient of the target's mean loss, averaged over all processes."""
        wanted = keep_factors and name not in self._without_factors and self._can_record()
        recorder = FactorRecorder(parameters.name) if wanted else None
        with aside(self._root), without_reduction(self._model), ExitStack() as stack:
            if recorder is not None:
                stack.enter_context(eager())
                stack.enter_context(recorder)
            loss = self._loss_fn(self._model, batch)
            check_loss(loss, f"on target {name!r}")
            found, _ = gradients([loss], None, parameters.trainable, self._ranks.sharded)
        self.factors.take(name, {} if recorder is None else recorder.found, found)
        if recorder is not None and not recorder.found:
            self._without_factors.add(name)
        if not self._ranks.sharded:
            found = (
                {n: found.get(n, torch.zeros_like(p)) for n, p in parameters.trainable.items()}
                if self._ranks.size > 1
                else found
            )
        value = loss.detach().clone()
        self._ranks.mean([value] if self._ranks.sharded else [value, *found.values()])
        return found, value

    def _can_record(self) -> bool:
        """Whether the target's activations make up its direction, and its operations can be seen."""
        return self._ranks.size == 1 and not is_compiled(self._model)

    def _refuse_nonfinite(self, name: str, direction: Direction) -> None:
        """An error for a direction that is not finite. On a GPU it comes one refresh later, so that
        nothing waits for it.
        """
        if not direction:
            raise GradsightError(
                f"the loss of target {name!r} depends on no trainable parameter: it gives no direction"
            )
        for past in self._unread:
            past[3].synchronize()
            _refuse_norms(*past[:3])
        self._unread = []
        parts = {n: local_part(d) for n, d in direction.items() if local_part(d).numel()}
        norms = torch.stack(
            [
                norm.float().to(self._ranks.device)
                for norm in torch._foreach_norm(list(parts.values()))
            ]
        )
        if self._ranks.sharded:
            norms = self._ranks.sum(norms)
        if norms.device.type != "cuda":
            _refuse_norms(name, list(parts), norms)
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        host = norms.to("cpu", non_blocking=True)
        event.record()
        self._unread.append((name, list(parts), host, event))


def _refuse_norms(target: str, names: list[str], norms: Tensor) -> None:
    finite = torch.isfinite(norms).tolist()
    bad = [name for name, good in zip(names, finite, strict=True) if not good]
    if bad:
        raise GradsightError(
            f"the gradient of target {target!r} holds NaN or Inf (in {', '.join(bad[:3])}), so no sample can be scored "
            "along it. Look at the target's loss; training itself can go on without observe()."
        )


def check_loss(loss: Any, where: str) -> None:
    """An error unless a loss function returned a scalar that can be differentiated."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else type(loss).__name__
        )
        raise UsageError(f"loss_fn must return a scalar mean loss, {where} it returned {got}")
    if not loss.requires_grad:
        raise UsageError(
            f"loss_fn's result {where} does not depend on the model's parameters, or gradients are switched off"
        )


def cosine(a: Direction, b: Direction, ranks: Ranks) -> Tensor:
    """The cosine of the angle between two directions."""
    pairs = [(a.get(n), b.get(n)) for n in {*a, *b}]
    ab = [dot(x, y) for x, y in pairs if x is not None and y is not None]
    aa, bb = (
        [dot(x, x) for x, _ in pairs if x is not None],
        [dot(y, y) for _, y in pairs if y is not None],
    )
    sums = torch.stack(
        [torch.stack(part).sum() if part else torch.zeros(()) for part in (ab, aa, bb)]
    )
    if ranks.sharded:
        sums = ranks.sum(sums)
    return sums[0] / (sums[1] * sums[2]).sqrt()
