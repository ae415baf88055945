"""The parameters that samples are scored by, found again in the operations that use them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradsight.core.parameters import named_parameters
from gradsight.core.samples import tensors_in
from gradsight.core.shards import is_sharded


class ScoredParameters:
    """The parameters of a model by name, and the names of the tensors that stand for them.

    Made anew for every block: between two of them parameters may be frozen, thawed or sharded.
    """

    def __init__(self, root: nn.Module) -> None:
        self.types_met: set[torch.dtype] = set()
        """Floating types that the model was seen to compute in, whatever its parameters are in."""
        self.root = root
        named = named_parameters(root)
        self.all = {each.name: each.tensor for each in named}
        self.trainable = {name: p for name, p in self.all.items() if p.requires_grad}
        self._names = {id(p): name for name, p in self.trainable.items()}
        # Looked up here, once: inside a traced pass each look at a dtype or a device is an
        # operation that the tracer sees.
        self.device = named[0].tensor.device
        """Where the first parameter lives."""
        self.score_dtype = _widest(self.trainable.values())
        """The scores' type: fp32, or fp64 for a model in fp64."""
        self.complex = next((n for n, p in self.trainable.items() if p.dtype.is_complex), None)
        """The name of a complex one, if any."""
        self.sharded = any(is_sharded(p) for p in self.all.values())
        """Whether fully_shard has spread them over processes."""
        self._places = self._find_places() if self.sharded else []

    def renewed(self) -> "ScoredParameters":
        """The same model's parameters as they are now."""
        new = ScoredParameters(self.root)
        new.types_met = self.types_met
        return new

    def name(self, tensor: Tensor) -> str | None:
        """The name of a trainable parameter; None for any other tensor."""
        name = self._names.get(id(tensor))
        if name is not None or not self.sharded:
            return name
        if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad or is_sharded(tensor):
            return None
        for module, attribute, own in self._places:
            if module._parameters.get(attribute) is tensor:
                return own
        return None

    def _find_places(self) -> list[tuple[nn.Module, str, str]]:
        """Where each parameter hangs, by module and attribute."""
        # fully_shard puts the whole tensor there while a layer runs.
        places = []
        for module in self.root.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in self._names:
                    places.append((module, attribute, self._names[id(parameter)]))
        return places


class TypesMet(TorchFunctionMode):
    """Notes the floating types of everything that is computed while it is on."""

    def __init__(self, parameters: ScoredParameters) -> None:
        super().__init__()
        self._met = parameters.types_met

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation; note the types of its results."""
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            if tensor.is_floating_point() and tensor.requires_grad:
                self._met.add(tensor.dtype)
        return out


def _widest(parameters: Iterable[Tensor]) -> torch.dtype:
    widest = torch.float32
    for dtype in {parameter.dtype.to_real() for parameter in parameters}:
        widest = torch.promote_types(widest, dtype)
    return widest
