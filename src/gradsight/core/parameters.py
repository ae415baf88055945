"""The parameters of a model under the model's own dotted names."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from gradsight.errors import UsageError
from gradsight.values.steps import Parameter

_COMPILED = frozenset({"_orig_mod"})
_LIGHTNING = frozenset({"_forward_module", "_original_module"})
_CALLED_IN_PARTS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
WRAPPER_ATTRIBUTES = _COMPILED | _LIGHTNING | _CALLED_IN_PARTS
"""Attributes in which torch.compile, Lightning, FSDP and checkpoint wrappers keep their module."""
DATA_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
"""Classes that keep their module as `module`. Elsewhere `module` is a name of the user's own."""


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


def check_module(model: object) -> None:
    """A model that a user hands in must be one; anything else is an error that says what came."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, got {type_name(model)}")


def type_name(thing: object) -> str:
    """What a wrong argument is, for an error."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    return type(thing).__name__


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
    parts = []
    module = model
    for component in name.split("."):
        if not _is_wrapping(module, component):
            parts.append(component)
        child = getattr(module, "_modules", {}).get(component)
        if child is not None:  # not its truth: a compiled module refuses to tell its length
            module = child
    return ".".join(parts)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model inside torch.compile, data-parallel wrappers and Lightning's.

    What runs it runs none of their collectives, graphs and casts, and what is hooked to it sees
    every call. The older FSDP and checkpoint wrappers stay around it: inside of FSDP's there are
    whole parameters only while FSDP calls it, and a checkpointed module is called again in
    backward.
    """
    inner = _inside(model, _COMPILED | _LIGHTNING, DATA_PARALLEL)
    return model if inner is None else unwrapped(inner)


def called_module(model: nn.Module) -> nn.Module:
    """The module to hook in order to see each call of the model once, with the whole batch.

    It lies inside of DistributedDataParallel and of Lightning's wrapper, since both let their
    module be called directly. It is the compiled module itself, as hooks inside would break its
    graph, and DataParallel itself, as that calls its module with parts of the batch.
    """
    inner = _inside(model, _LIGHTNING, (nn.parallel.DistributedDataParallel,))
    return model if inner is None else called_module(inner)


def _inside(
    model: nn.Module, attributes: frozenset[str], classes: tuple[type[nn.Module], ...]
) -> nn.Module | None:
    """The module that `model` wraps under one of these attributes, or as one of these classes."""
    for key, child in model._modules.items():
        wrapping = isinstance(model, classes) if key == "module" else key in attributes
        if wrapping and child is not None and _holds_all(child, model):
            return child
    return None


def _holds_all(inner: nn.Module, model: nn.Module) -> bool:
    """Whether no parameter lies outside; else a user's model happens to use a wrapper's name."""
    held = {id(parameter) for parameter in inner.parameters()}
    return all(id(parameter) in held for parameter in model.parameters())


def _is_wrapping(parent: nn.Module, component: str) -> bool:
    if component == "module":
        return isinstance(parent, DATA_PARALLEL)
    return component in WRAPPER_ATTRIBUTES


def _walk(
    module: nn.Module, prefix: str, open_modules: dict[int, None]
) -> Iterator[tuple[str, Tensor]]:
    """Depth first, each module as often as it is used: tied weights show all their names."""
    if id(module) in open_modules:  # a module that holds itself, on whatever way
        return
    open_modules[id(module)] = None
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + key, parameter
    for key, child in module._modules.items():
        if child is None:
            continue
        below = prefix if _is_wrapping(module, key) else f"{prefix}{key}."
        yield from _walk(child, below, open_modules)
    del open_modules[id(module)]
