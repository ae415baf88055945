# mypy: allow-untyped-calls
"""What a checkpointed block was given: it must still be the same when the block is run again.

A block that writes to what it was given, or to its parameters, would be recomputed from something
else, and so would one whose inputs or parameters somebody changes before backward. Torch has an
error for some of these, which names no module, and for others nothing.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedParameter

from gradsight.core.samples import tensors_in
from gradsight.errors import GradsightError
from gradsight.memory.storages import version_of
from gradsight.memory.write_finder import WriteFinder, line_of_write


class WrittenInPlace(GradsightError):
    """A block cannot be recomputed, because what it was given is written to."""


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """A tensor as it was when the block was called."""

    tensor: torch.Tensor
    writes: int | None
    """Torch's count of writes."""

    def is_changed(self) -> bool:
        """Whether somebody wrote to it since."""
        return version_of(self.tensor) != self.writes


class GivenTensors:
    """The arguments and parameters of one call of a block, as they were before it."""

    def __init__(self, block: str, module: nn.Module, arguments: Sequence[Any]) -> None:
        self._block = f"the block {block!r} ({type(module).__name__})"
        self._arguments = [GivenTensor(each, version_of(each)) for each in tensors_in(*arguments)]
        self._parameters = _counted(module.parameters())
        self._module = module

    @contextmanager
    def looking_for_writes(self) -> Iterator[None]:
        """Look at every operator of the block's run: `.data` is no secret then, on any device."""
        arguments = [given.tensor for given in self._arguments]
        parameters = [given.tensor for given in self._parameters]
        if any(isinstance(tensor, FakeTensor) for tensor in (*arguments, *parameters)):
            yield  # a prediction: there are no values that could be wrong
            return
        to_arguments = WriteFinder(arguments)
        # Gemma 3n clamps coefficients in forward, which changes nothing the second time.
        to_parameters = WriteFinder(parameters, by_value=True)
        with to_arguments, to_parameters:
            yield
        if to_arguments.found:
            raise self._write_to_arguments(to_arguments.line)
        if to_parameters.found:
            raise self._write_to_parameters(to_parameters.line)

    def refuse_writes_inside(self, run: Callable[..., Any], leaves: Sequence[Any]) -> None:
        """The block has returned: refuse it if it wrote to its arguments."""
        if _changed(self._arguments):
            raise self._write_to_arguments(line_of_write(run, leaves))
        self._parameters = _counted(self._module.parameters())

    def watch(self, out: Any) -> None:
        """Look again when backward reaches the block's results, just before it is recomputed."""
        given = {id(each.tensor) for each in self._arguments}
        looking = _Look(self)
        for tensor in tensors_in(out):
            if tensor.requires_grad and id(tensor) not in given:
                tensor.register_hook(looking)

    def refuse_writes_since(self) -> None:
        """Refuse to recompute the block from tensors that were written to after it returned."""
        if changed := _changed(self._arguments):
            shape = tuple(changed[0].shape)
            raise WrittenInPlace(
                f"a tensor of shape {shape} that {self._block} was given was written to after the "
                "block had returned, and before backward: the block cannot be recomputed from it. "
                "Give the block a copy (clone()), or write mask = mask + 1 instead of mask += 1"
            )
        if changed := _changed(self._parameters):
            raise WrittenInPlace(
                f"the parameter {self._name_of(changed[0])!r} of {self._block} was written to "
                "between its forward and its backward, for example by optimizer.step(): the block "
                "would be recomputed with other weights. Run backward first"
            )

    def _write_to_arguments(self, line: str | None) -> WrittenInPlace:
        place = line or "the line could not be found"
        return WrittenInPlace(
            f"{self._block} writes in place to what it is given ({place}): when it is recomputed "
            "in backward, its input is gone. Write to a result of its own (for example x = x + y "
            "instead of x += y, or ReLU(inplace=False)), or leave the block out with blocks=[...]"
        )

    def _write_to_parameters(self, line: str | None) -> WrittenInPlace:
        return WrittenInPlace(
            f"{self._block} writes other values to its own parameters ({line}): recomputed in "
            "backward it would write a second time, and run with other weights. Write to them "
            "outside of forward, or leave the block out with blocks=[...]"
        )

    def _name_of(self, parameter: torch.Tensor) -> str:
        names = {id(tensor): name for name, tensor in self._module.named_parameters()}
        return names.get(id(parameter), "")


class _Look:
    """A hook that does not keep alive what it looks at."""

    def __init__(self, given: GivenTensors) -> None:
        self._given = weakref.ref(given)

    def __call__(self, gradient: torch.Tensor) -> None:
        given = self._given()
        if given is not None:
            given.refuse_writes_since()


def _counted(parameters: Iterable[nn.Parameter]) -> list[GivenTensor]:
    """Parameters with their counts of writes."""
    return [
        GivenTensor(parameter, version_of(parameter))
        for parameter in parameters
        if not isinstance(parameter, UninitializedParameter)  # filled by the first call
    ]


def _changed(given: Iterable[GivenTensor]) -> list[torch.Tensor]:
    return [each.tensor for each in given if each.is_changed()]
