"""The parameters of a model under the model's own dotted names."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from gradsight.values.steps import Parameter

_WRAPPER_COMPONENTS = {
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
}
"""Attributes under which torch.compile, FSDP, checkpoint wrappers and Lightning keep the module
they wrap.
"""
_DATA_PARALLEL = {"DistributedDataParallel", "DataParallel"}
"""Classes that keep the module they wrap as `module`. Elsewhere `module` is a name of the user's
own.
"""


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter and all its names; the first is the one that is used."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        """The name under which this parameter is recorded."""
        return self.names[0]

    def describe(self) -> Parameter:
        """The same without the tensor."""
        tensor = self.tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Parameter(
            self.name, tuple(tensor.shape), dtype, tensor.requires_grad, self.names[1:]
        )


def named_parameters(model: nn.Module) -> list[Named]:
    """Every parameter once, in the model's order, without the names that wrappers add."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in _walk(model, "", {}):
        tensors.setdefault(id(tensor), tensor)
        known = names.setdefault(id(tensor), [])
        if name not in known:
            known.append(name)
    return [Named(tuple(names[key]), tensor) for key, tensor in tensors.items()]


def clean_name(model: nn.Module, name: str) -> str:
    """One name as `named_parameters` gives it, for a raw name of `model.named_parameters()`."""
    parts, module = [], model
    for component in name.split("."):
        if not _is_wrapping(module, component):
            parts.append(component)
        child = getattr(module, "_modules", {}).get(component)
        module = (
            module if child is None else child
        )  # not its truth: a compiled module refuses to be asked for its length
    return ".".join(parts)


def _is_wrapping(parent: nn.Module, component: str) -> bool:
    if component == "module":
        return any(cls.__name__ in _DATA_PARALLEL for cls in type(parent).__mro__)
    return component in _WRAPPER_COMPONENTS


def _walk(
    module: nn.Module, prefix: str, open_modules: dict[int, None]
) -> Iterator[tuple[str, Tensor]]:
    """Depth first, each module as often as it is used, so that tied weights show all their names."""
    if id(module) in open_modules:
        return
    open_modules[id(module)] = None
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + key, parameter
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(
                child, prefix if _is_wrapping(module, key) else f"{prefix}{key}.", open_modules
            )
    del open_modules[id(module)]
