"""One call of a model, and how to be told of it without disturbing anything."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradsight.core.calls import RecordedCall, is_suspended


class Call:
    """One call of the model, while its step lasts."""

    __slots__ = (
        "__weakref__",
        "backward_caller",
        "buffer_versions",
        "bytes",
        "gradient_bytes",
        "gradients",
        "made",
        "nodes",
        "tensors",
        "too_large",
        "versions",
    )

    def __init__(self, made: RecordedCall, tensors: list[Tensor]) -> None:
        self.made = made
        self.backward_caller: str | None = None
        self.tensors = tensors
        self.versions = [tensor._version for tensor in tensors]
        self.bytes = sum(tensor.nbytes for tensor in tensors)
        self.buffer_versions: list[int] = []
        self.gradients: list[Tensor | None] = []
        """The gradients that came back to the tensors of the output, through whatever uses them."""
        self.nodes: dict[int, Any] = {}
        """By place in the output: the autograd node that a gradient came back to. Held from then
        on: before that, it would keep the activations of a pass alive that nobody wants any more.
        """
        self.gradient_bytes = 0
        self.too_large = False

    def drop_gradients(self) -> None:
        """They take too much memory."""
        self.too_large = True
        self.gradients = []
        self.gradient_bytes = 0

    def changed(self) -> bool:
        """Whether somebody has changed an argument in place since."""
        return any(
            tensor._version != version
            for tensor, version in zip(self.tensors, self.versions, strict=True)
        )


class Told(Protocol):
    """Who wants to know of a model's calls."""

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is about to be called."""

    def after(self, output: Any) -> None:
        """It has returned."""


class Hook:
    """A hook of ours. A copy of the model, or one that was saved and loaded, has one that does
    nothing.
    """

    def __init__(self, calls: Told | None = None) -> None:
        self._calls = calls

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        return type(self)()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class Before(Hook):
    """Tells of a call to come."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._calls is not None:
            self._calls.before(args, kwargs)


class After(Hook):
    """Tells of a call that has returned."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._calls is not None:
            self._calls.after(output)


def around(calls: Told, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled call that is told of before and after, outside of what is compiled."""

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.before(args, kwargs)
        output = compiled(*args, **kwargs)
        calls.after(output)
        return output

    return call


def is_aside() -> bool:
    """Whether a call is no pass of the training: ours, one being compiled, or one inside
    torch.func.
    """
    return (
        is_suspended()
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def autocast() -> tuple[str, str] | None:
    """Device type and dtype of the autocast that is on; None where none is."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return device, str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None


def tensors_of(values: Sequence[Any]) -> Iterator[Tensor]:
    """All tensors among the arguments of a call."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from tensors_of(list(value.values()))
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)
