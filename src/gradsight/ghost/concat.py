"""Training and validation rows in one forward pass.

The loss function's call is split by rows: what it returns to the training loop is the training
rows' own mean loss, so .grad is the training gradient alone, scaled as in plain training whatever
labels are ignored. The validation rows' mean loss is kept, and pulled back through the same graph
just before the training loop's own backward pass: then the directions are known.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core.samples import LOSSES
from gradsight.errors import GradsightError, UsageError
from gradsight.ghost.derivative import name_of
from gradsight.ghost.gradients import gradients
from gradsight.ghost.observation import refuse_mixing
from gradsight.ghost.parameters import Parameters
from gradsight.ghost.rules.registry import DECLINED
from gradsight.ghost.targets import Targets

ADVICE = "Use mode='two_pass', which has no such limit."


class Concatenation:
    """One pass over training rows followed by the rows of every target."""

    def __init__(
        self, targets: Targets, pairs: Mapping[str, tuple[Tensor, Tensor]], parameters: Parameters
    ) -> None:
        self._targets, self._pairs, self._parameters = targets, pairs, parameters
        self.losses: dict[str, Tensor] = {}
        self.rows = 0
        self.total = 0

    def join(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the batch, then those of the targets."""
        for name, (xv, yv) in self._pairs.items():
            for what, train, val in (("inputs", x, xv), ("labels", y, yv)):
                if train.shape[1:] != val.shape[1:] or train.dtype != val.dtype:
                    raise UsageError(
                        f"the validation {what} of target {name!r} are of shape {tuple(val.shape)} ({val.dtype}), the "
                        f"training {what} of "
                        f"shape {tuple(train.shape)} ({train.dtype}): rows of another length or type cannot go through "
                        f"one pass. {ADVICE}"
                    )
        self.rows = x.shape[0]
        self.total = self.rows + sum(xv.shape[0] for xv, _ in self._pairs.values())
        return torch.cat([x, *(xv for xv, _ in self._pairs.values())]), torch.cat(
            [y, *(yv for _, yv in self._pairs.values())]
        )

    def on_call(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Refuse dropout, split the loss, leave everything else."""
        refuse_mixing(func, args, kwargs)
        refuse_dropout(func, args, kwargs)
        if func not in LOSSES or not torch.is_grad_enabled():
            return DECLINED
        return self._split_loss(func, list(args), dict(kwargs))

    def on_backward(self, loss: Tensor) -> None:
        """Pull every target's loss back through the graph: the directions."""
        if not self.losses:
            raise GradsightError(
                "mode='concat' found no loss function of torch in the pass (it knows "
                f"{', '.join(sorted(loss.__name__ for loss in LOSSES))}), so the "
                f"validation rows cannot be told from the training rows in the loss. {ADVICE}"
            )
        named = self._parameters.trainable
        found = {
            n: gradients([v], None, named, sharded=False, keep_graph=True)[0]
            for n, v in self.losses.items()
        }
        for name, direction in found.items():
            self._targets.set(name, direction, self.losses[name].detach())
        self.losses = {}

    def check_clean(self, table: Tensor) -> None:
        """An error if the directions were not found, or if validation rows took part in the
        training gradient.
        """
        if not self._targets.directions:
            raise GradsightError(
                "the backward pass was not seen, so the validation rows' gradient was not taken: with mode='concat' call "
                "loss.backward() between prepare_forward_input() and prepare_gradients()"
            )
        if bool((table[:, self.rows :] != 0).any()):
            raise GradsightError(
                "validation rows took part in the training gradient: a part of the loss does not go through a loss "
                "function of torch. "
                f"Discard .grad of this step. {ADVICE}"
            )

    def _split_loss(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        named = {i: kwargs.pop(n) for i, n in enumerate(("input", "target")) if n in kwargs}
        data = [named[i] if i in named else args[i] for i in (0, 1)]
        rest = args[len([i for i in (0, 1) if i not in named]) :]
        if kwargs.get("reduction", "mean") == "none" or any(t.shape[0] % self.total for t in data):
            raise GradsightError(
                f"mode='concat' cannot split {name_of(func)} by rows: it needs reduction 'mean' or 'sum' and "
                f"{self.total} samples in "
                f"rows, got shapes {[tuple(t.shape) for t in data]}. {ADVICE}"
            )
        if self.losses:
            raise GradsightError(
                f"mode='concat' can split one call of a loss function per pass, this is the second. {ADVICE}"
            )
        start = 0
        found = []
        for rows in (self.rows, *(xv.shape[0] for xv, _ in self._pairs.values())):
            pieces = [
                t.narrow(0, start * (t.shape[0] // self.total), rows * (t.shape[0] // self.total))
                for t in data
            ]
            found.append(func(*pieces, *rest, **kwargs))
            start += rows
        self.losses = dict(zip(self._pairs, found[1:], strict=True))
        return found[0]


def refuse_concat(root: nn.Module, processes: int) -> None:
    """An error where one pass over training and validation rows cannot be right."""
    if processes > 1:
        raise GradsightError(f"mode='concat' works in one process, got {processes}. {ADVICE}")
    for name, module in root.named_modules():
        rate = (
            getattr(module, "p", 0.0)
            if isinstance(module, nn.modules.dropout._DropoutNd)
            else getattr(module, "dropout", 0.0)
        )
        if module.training and isinstance(rate, float) and rate > 0:
            raise GradsightError(
                f"dropout is active in {name or 'the model'} (p={rate}): with mode='concat' the validation rows would "
                "be dropped out "
                f"too. {ADVICE}"
            )


def refuse_dropout(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """An error if this call is an active dropout."""
    name = name_of(func)
    if name == "scaled_dot_product_attention":
        rate, active = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0), True
    elif "dropout" in name:
        rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        active = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    else:
        return
    if active and rate:
        raise GradsightError(
            f"{name} with p={rate} is active: with mode='concat' the validation rows would be dropped out too. {ADVICE}"
        )
