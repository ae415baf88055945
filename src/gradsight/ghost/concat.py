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
from gradsight.ghost.derivative import function_name
from gradsight.ghost.gradients import gradients
from gradsight.ghost.parameters import ScoredParameters
from gradsight.ghost.targets import Targets
from gradsight.ghost.use import DECLINED, argument_of

ADVICE = "Use mode='two_pass', which has no such limit."


class Concatenation:
    """One pass over training rows followed by the rows of every target."""

    def __init__(self, targets: Targets, parameters: ScoredParameters) -> None:
        self._targets = targets
        self._parameters = parameters
        self._pairs = pairs_of(targets.batches)
        self.losses: dict[str, Tensor] = {}
        self.rows = 0
        self.total = 0
        self._fault: GradsightError | None = None

    def join(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the batch, then those of the targets."""
        for name, (xv, yv) in self._pairs.items():
            _refuse_other_rows(name, "inputs", x, xv)
            _refuse_other_rows(name, "labels", y, yv)
        inputs = [x, *(xv for xv, _ in self._pairs.values())]
        labels = [y, *(yv for _, yv in self._pairs.values())]
        self.rows = x.shape[0]
        self.total = sum(part.shape[0] for part in inputs)
        return torch.cat(inputs), torch.cat(labels)

    def intercept(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Refuse dropout, split the loss, leave everything else."""
        # The modules were asked already, but a model may call F.dropout itself.
        refuse_dropout(func, args, kwargs)
        if func not in LOSSES or not torch.is_grad_enabled():
            return DECLINED
        return self._split_loss(func, list(args), dict(kwargs))

    def find_directions(self) -> None:
        """Pull every target's loss back through the graph."""
        if not self.losses:
            known = ", ".join(sorted(loss.__name__ for loss in LOSSES))
            raise GradsightError(
                f"mode='concat' found no loss function of torch in the pass (it knows {known}), so "
                "the validation rows cannot be told from the training rows in the loss. "
                f"{ADVICE}"
            )
        named = self._parameters.trainable
        directions = {
            name: gradients([loss], None, named, sharded=False, keep_graph=True)[0]
            for name, loss in self.losses.items()
        }
        for name, direction in directions.items():
            loss = self.losses[name].detach()
            try:
                self._targets.set(name, direction, loss)
            except GradsightError as error:
                # Raised when the pass is over: here it would break off the training loop's own.
                self._fault = error
                nothing = {each: torch.zeros_like(part) for each, part in direction.items()}
                self._targets.set(name, nothing, loss)
        self.losses = {}

    def check_clean(self, table: Tensor) -> None:
        """An error if directions were not found, or validation rows took part in the gradient."""
        if self._fault is not None:
            raise self._fault
        if not self._targets.directions:
            raise GradsightError(
                "the backward pass was not seen, so the validation rows' gradient was not taken: "
                "with mode='concat' call loss.backward() between prepare_forward_input() and "
                "prepare_gradients()"
            )
        if bool((table[:, self.rows :] != 0).any()):
            raise GradsightError(
                "validation rows took part in the training gradient: a part of the loss does not "
                f"go through a loss function of torch. Discard .grad of this step. {ADVICE}"
            )

    def _split_loss(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The training rows' loss; the loss of each target's rows is kept."""
        predictions = kwargs.pop("input") if "input" in kwargs else args.pop(0)
        labels = kwargs.pop("target") if "target" in kwargs else args.pop(0)
        data = [predictions, labels]
        reduced = kwargs.get("reduction", "mean") != "none"
        if not reduced or any(t.shape[0] % self.total for t in data):
            raise GradsightError(
                f"mode='concat' cannot split {function_name(func)} by rows: it needs reduction "
                f"'mean' or 'sum' and {self.total} samples in rows, got shapes "
                f"{[tuple(t.shape) for t in data]}. {ADVICE}"
            )
        if self.losses:
            raise GradsightError(
                "mode='concat' can split one call of a loss function per pass, this is the "
                f"second. {ADVICE}"
            )
        start = 0
        losses = []
        for rows in (self.rows, *(xv.shape[0] for xv, _ in self._pairs.values())):
            # A loss over positions has several entries per sample, side by side.
            entries = [t.shape[0] // self.total for t in data]
            pieces = [t.narrow(0, start * n, rows * n) for t, n in zip(data, entries, strict=True)]
            losses.append(func(*pieces, *args, **kwargs))
            start += rows
        self.losses = dict(zip(self._pairs, losses[1:], strict=True))
        return losses[0]


def pairs_of(batches: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """The validation batches as pairs (X, Y); an error if one is something else."""
    pairs = {}
    for name, batch in batches.items():
        is_sequence = isinstance(batch, tuple | list) and len(batch) == 2
        if not is_sequence or not all(isinstance(part, Tensor) for part in batch):
            raise UsageError(
                "mode='concat' needs validation data as a pair (X, Y) of tensors; target "
                f"{name!r} is {type(batch).__name__}"
            )
        pairs[name] = (batch[0], batch[1])
    return pairs


def _refuse_other_rows(target: str, what: str, train: Tensor, val: Tensor) -> None:
    if train.shape[1:] != val.shape[1:] or train.dtype != val.dtype:
        raise UsageError(
            f"the validation {what} of target {target!r} are of shape {tuple(val.shape)} "
            f"({val.dtype}), the training {what} of shape {tuple(train.shape)} ({train.dtype}): "
            f"rows of another length or type cannot go through one pass. {ADVICE}"
        )


def refuse_concat(root: nn.Module, processes: int) -> None:
    """An error where one pass over training and validation rows cannot be right."""
    if processes > 1:
        raise GradsightError(f"mode='concat' works in one process, got {processes}. {ADVICE}")
    for name, module in root.named_modules():
        # Attention and recurrent layers keep their rate under another name.
        attribute = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
        rate = getattr(module, attribute, 0.0)
        if module.training and isinstance(rate, float) and rate > 0:
            raise GradsightError(
                f"dropout is active in {name or 'the model'} (p={rate}): with mode='concat' the "
                f"validation rows would be dropped out too. {ADVICE}"
            )


def refuse_dropout(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """An error if this call is an active dropout."""
    name = function_name(func)
    if name == "scaled_dot_product_attention":
        rate = argument_of(args, kwargs, 4, "dropout_p", 0.0)
        active = True
    elif "dropout" in name:
        rate = argument_of(args, kwargs, 1, "p", 0.5)
        active = argument_of(args, kwargs, 2, "training", kwargs.get("train", True))
    else:
        return
    if active and rate:
        raise GradsightError(
            f"{name} with p={rate} is active: with mode='concat' the validation rows would be "
            f"dropped out too. {ADVICE}"
        )
