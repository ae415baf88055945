"""One call of a model, and how to be told of it without disturbing anything."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradsight.core.calls import RecordedCall, is_suspended
from gradsight.core.layouts import held_bytes, is_in_memory, versions
from gradsight.incidents.loss_lines import Between


class KeptCall:
    """One call of the model, while its step lasts."""

    __slots__ = (
        "__weakref__",
        "backward_caller",
        "buffer_versions",
        "bytes",
        "gradient_bytes",
        "gradients",
        "is_clean",
        "loss",
        "loss_values",
        "made",
        "micro_batch",
        "nodes",
        "part",
        "root",
        "tensors",
        "too_large",
        "versions",
    )

    def __init__(self, made: RecordedCall, tensors: list[Tensor], micro_batch: int) -> None:
        self.made = made
        self.part = made.part
        self.micro_batch = micro_batch
        """How many backward passes came between the first call of the step and this one."""
        self.backward_caller: str | None = None
        self.root: Tensor | None = None
        """What backward was called on after this call."""
        self.loss = Between()
        """Where the loss lies that was made of this call."""
        self.loss_values: Any = None
        """What autograd had saved of it, where it was not finite."""
        self.tensors = tensors
        self.versions = versions(tensors)
        self.bytes = held_bytes(tensors)
        self.buffer_versions: list[int] = []
        self.gradients: list[Tensor | None] = []
        """The gradients that came back to the tensors of the output, through whatever uses them."""
        self.nodes: dict[int, Any] = {}
        """By place in the output: the autograd node that a gradient came back to."""
        # Held from then on only: before, it would keep the activations of a pass alive that
        # nobody wants any more.
        self.gradient_bytes = 0
        self.too_large = False
        self.is_clean = False
        """Whether the gradient of the model was still finite after it."""

    def drop_gradients(self) -> None:
        """They take too much memory."""
        self.too_large = True
        self.gradients = []
        self.gradient_bytes = 0

    def changed(self) -> bool:
        """Return whether an argument was changed in place or freed since the call."""
        if not all(map(is_in_memory, self.tensors)):
            return True
        return versions(self.tensors) != self.versions


def around(
    before: Callable[..., None], compiled: Callable[..., Any], after: Callable[..., None]
) -> Callable[..., Any]:
    """A compiled call that is told of before and after, outside of what is compiled."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before(args, kwargs)
        output = compiled(*args, **kwargs)
        after(args, output)
        return output

    return call


def is_not_training() -> bool:
    """Whether a call is ours, one that is being compiled, or one inside torch.func."""
    return (
        is_suspended()
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
