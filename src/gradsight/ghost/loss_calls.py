# mypy: allow-untyped-calls
"""How the losses of training and validation rows come out of one call of the model.

Where the model computes its loss itself, the call of torch's loss function inside of it is split by
rows. Where the loss is made of the model's outputs, the user's loss function is run once on the
outputs of the training rows and once on those of each target's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradsight.core.beside import beside_training, eager
from gradsight.core.random_state import randomness_kept
from gradsight.core.samples import LOSSES, nearly_equal, tensors_in
from gradsight.ghost.arguments import calling_loss_fn
from gradsight.ghost.joined_batch import JoinedBatch
from gradsight.ghost.joined_calls import join_losses
from gradsight.ghost.one_pass import OnePass, OnePassRefusal
from gradsight.ghost.row_parts import RowParts, pieces_of
from gradsight.ghost.sample_axis import SampleLayout
from gradsight.ghost.targets import LossFn, check_loss


@dataclass(frozen=True, slots=True)
class LossCalls:
    """The user's loss function, and where it computes the loss."""

    model: nn.Module
    loss_fn: LossFn
    inside: bool
    """Whether the model computes its loss itself."""

    def join(self, batch: Any, targets: Mapping[str, Any]) -> "JoinedLossCall":
        """All rows as one call of the model."""
        if self.inside:
            return JoinedLossCall(self, [batch], JoinedBatch(batch, targets))
        batches = [batch, *targets.values()]
        with randomness_kept():
            calls = [self._arguments(each) for each in batches]
        named = dict(zip(targets, calls[1:], strict=True))
        return JoinedLossCall(self, batches, JoinedBatch(calls[0], named))

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the loss function calls the model with."""
        try:
            with torch.no_grad():
                self.loss_fn(_Stopped(self.model), batch)
        except _Called as called:
            return called.arguments
        raise OnePassRefusal("loss_fn does not call the model that it is given.")


@dataclass(frozen=True, slots=True)
class JoinedLossCall:
    """One call of the model for all rows."""

    calls: LossCalls
    batches: Sequence[Any]
    joined: JoinedBatch

    @property
    def parts(self) -> RowParts:
        """Whose rows are whose."""
        return self.joined.parts

    def run(self, one_pass: OnePass) -> Tensor:
        """The training rows' loss, joined with the targets'."""
        calls = self.calls
        if calls.inside:
            with calling_loss_fn("on training and validation rows together", self.batches[0]):
                return calls.loss_fn(calls.model, self.joined.rows)
        joined = _Joined(calls.model, self.joined)
        with calling_loss_fn("on the training batch", self.batches[0]):
            losses = [calls.loss_fn(joined, self.batches[0])]
        for number, batch in enumerate(self.batches[1:], 1):
            given = _Given(calls.model, joined.outputs()[number])
            with calling_loss_fn("on a target's rows", batch), randomness_kept():
                losses.append(calls.loss_fn(given, batch))
        for loss in losses:
            check_loss(loss, "on the rows of one pass")
        return join_losses(one_pass, losses)


class _Called(BaseException):
    """The model was called; not an Exception, which a loss function might catch."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = args, kwargs


class _StandInModel:
    """Looks like the model, but for its call."""

    def __init__(self, model: nn.Module) -> None:
        object.__setattr__(self, "_model", model)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_model"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)


class _Stopped(_StandInModel):
    """Ends the loss function where it calls the model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)

    forward = __call__


class _Joined(_StandInModel):
    """Runs the model on all rows where the loss function calls it; returns the training rows'.

    There, and not before: the loss function may have opened an autocast around its call.
    """

    def __init__(self, model: nn.Module, joined: JoinedBatch) -> None:
        super().__init__(model)
        object.__setattr__(self, "_joined", joined)
        object.__setattr__(self, "_found", [])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows, named = self._joined.rows
        output = self._model(*rows, **named)
        self._found.append(split_output(output, self._joined.parts))
        return self.outputs()[0]

    def outputs(self) -> list[Any]:
        """The model's output for the training rows, and for each target's."""
        if len(self._found) != 1:
            raise OnePassRefusal(f"loss_fn calls the model {len(self._found)} times, not once.")
        found: list[Any] = self._found[0]
        return found

    forward = __call__


class _Given(_StandInModel):
    """Returns an output that is there already."""

    def __init__(self, model: nn.Module, output: Any) -> None:
        super().__init__(model)
        object.__setattr__(self, "_output", output)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._output

    forward = __call__


def split_output(output: Any, parts: RowParts) -> list[Any]:
    """A model's output for the rows of training, and of each target.

    >>> split_output({"logits": torch.arange(3)}, RowParts(2, (1,)))
    [{'logits': tensor([0, 1])}, {'logits': tensor([2])}]
    """
    leaves, spec = tree_flatten(output)
    # One split for all: the gradient of each piece alone would be as large as that of the whole.
    pieces = [_pieces(leaf, parts) for leaf in leaves]
    numbers = range(len(parts.sizes))
    return [tree_unflatten([each[number] for each in pieces], spec) for number in numbers]


def _pieces(leaf: Any, parts: RowParts) -> list[Any]:
    same = [leaf] * len(parts.sizes)
    if isinstance(leaf, Tensor):
        if leaf.dim() > 0 and leaf.shape[0] % parts.total == 0 and leaf.shape[0]:
            return pieces_of(leaf, SampleLayout(), parts)
        if not leaf.requires_grad:
            return same
    elif not tensors_in(leaf):
        return same
    what = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf)
    raise OnePassRefusal(
        f"the model returns {what}, in which the rows of {parts.total} samples cannot be told."
    )


class _LossesSeen(TorchFunctionMode):
    """Notes whether a loss function of torch's runs while the model does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.depth = 0
        self.inside = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation."""
        self.inside |= self.depth > 0 and func in LOSSES
        return func(*args, **(kwargs or {}))

    def entered(self, module: nn.Module, args: Any) -> None:
        """The model's forward begins."""
        self.calls += 1
        self.depth += 1

    def left(self, module: nn.Module, args: Any, output: Any) -> None:
        """It has returned."""
        self.depth -= 1


def find_loss_calls(model: nn.Module, root: nn.Module, loss_fn: LossFn, batch: Any) -> LossCalls:
    """Look where the loss is computed, in a pass without gradients beside training."""
    seen = _LossesSeen()
    before = root.register_forward_pre_hook(seen.entered)
    after = root.register_forward_hook(seen.left, always_call=True)
    try:
        with (
            beside_training(root, evaluating=True),
            eager(),
            torch.no_grad(),
            seen,
            calling_loss_fn("on the training batch", batch),
        ):
            loss_fn(model, batch)
    finally:
        before.remove()
        after.remove()
    if seen.calls != 1:
        raise OnePassRefusal(f"loss_fn calls the model {seen.calls} times, one pass once.")
    return LossCalls(model, loss_fn, seen.inside)


def refuse_other_losses(
    found: Sequence[Tensor], plain: Sequence[Tensor], names: Sequence[str], within: float
) -> None:
    """An error unless one pass finds the losses that loss_fn gives each batch alone."""
    for mine, theirs, name in zip(found, plain, names, strict=True):
        if not nearly_equal(mine.reshape(()), theirs.reshape(()).to(mine), within):
            raise OnePassRefusal(
                f"the loss of {name} comes out of one pass as {float(mine):.6g}, out of a pass of "
                f"its own as {float(theirs):.6g}: a part of it does not go through one loss "
                "function of torch's with the mean over its own rows, or rows depend on each "
                "other."
            )
