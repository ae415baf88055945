# mypy: allow-untyped-calls
"""What a checkpointed block was given: it must still be the same when the block is run again.

A block that writes to what it was given would be recomputed from something else, and so would one
whose inputs or parameters somebody changes before backward. Torch has an error for some of these,
which names no module, and for others nothing.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gradsight.core.random_state import randomness_kept
from gradsight.core.samples import tensors_in
from gradsight.core.source import working_line
from gradsight.errors import GradsightError
from gradsight.memory.storages import storages, version_of, written_tensors


class WrittenInPlace(GradsightError):
    """A block cannot be recomputed, because what it was given is written to."""


class GivenTensors:
    """The arguments and parameters of one call of a block, with their counts of writes."""

    def __init__(self, block: str, module: nn.Module, arguments: Sequence[Any]) -> None:
        self._block = f"the block {block!r} ({type(module).__name__})"
        self._arguments = _counted(tensors_in(*arguments))
        self._parameters = _counted(module.parameters())
        self._module = module

    def refuse_writes_inside(self, run: Callable[..., Any], leaves: Sequence[Any]) -> None:
        """The block has returned: refuse it if it wrote to its arguments."""
        if not _written(self._arguments):
            # What a block does to its own parameters in forward is its own affair.
            self._parameters = _counted(tensor for tensor, _ in self._parameters)
            return
        raise WrittenInPlace(
            f"{self._block} writes in place to what it is given{_line_of_write(run, leaves)}: when "
            "it is recomputed in backward, its input is gone. Write to a result of its own (for "
            "example x = x + y instead of x += y, or ReLU(inplace=False)), or leave the block out "
            "with blocks=[...]"
        )

    def watch(self, out: Any) -> None:
        """Look again when backward reaches the block's results, just before it is recomputed."""
        given = {id(tensor) for tensor, _ in self._arguments}
        looking = _Look(self)
        for tensor in tensors_in(out):
            if tensor.requires_grad and id(tensor) not in given:
                tensor.register_hook(looking)

    def refuse_writes_since(self) -> None:
        """Refuse to recompute the block from tensors that were written to after it returned."""
        if changed := _written(self._arguments):
            shape = tuple(changed[0].shape)
            raise WrittenInPlace(
                f"a tensor of shape {shape} that {self._block} was given was written to after the "
                "block had returned, and before backward: the block cannot be recomputed from it. "
                "Give the block a copy (clone()), or write mask = mask + 1 instead of mask += 1"
            )
        if changed := _written(self._parameters):
            names = {id(tensor): name for name, tensor in self._module.named_parameters()}
            name = names.get(id(changed[0]), "")
            raise WrittenInPlace(
                f"the parameter {name!r} of {self._block} was written to between its forward and "
                "its backward, for example by optimizer.step(): the block would be recomputed with "
                "other weights. Run backward first"
            )


class _Look:
    """A hook that does not keep alive what it looks at."""

    def __init__(self, given: GivenTensors) -> None:
        self._given = weakref.ref(given)

    def __call__(self, gradient: torch.Tensor) -> None:
        given = self._given()
        if given is not None:
            given.refuse_writes_since()


def _counted(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> list[Any]:
    return [(tensor, version_of(tensor)) for tensor in tensors]


def _written(counted: list[Any]) -> list[torch.Tensor]:
    """The tensors that were written to since they were counted."""
    return [tensor for tensor, count in counted if version_of(tensor) != count]


def _line_of_write(run: Callable[..., Any], leaves: Sequence[Any]) -> str:
    """The line that writes to an argument, found by running the block again on copies."""
    copies = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), list(leaves))
    finder = _WriteFinder(tensors_in(copies))
    try:
        with torch.no_grad(), randomness_kept(), finder:
            run(*copies)
    except Exception:
        pass  # the line is an extra: what is refused stays refused
    return "" if finder.line is None else f" ({finder.line})"


class _WriteFinder(TorchDispatchMode):
    """Finds the first line that writes to one of these tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.line: str | None = None
        self._watched = {storage._cdata for tensor in tensors for storage in storages(tensor)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            if self.line is None and any(s._cdata in self._watched for s in storages(tensor)):
                self.line = working_line()
        return func(*args, **kwargs)
