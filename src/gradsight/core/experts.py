"""Which parameters hold experts: tensors [E, ...] with a slice for each, and lists of modules.

A tensor of three dimensions may as well be a convolution, one matrix per head of attention, or a
table of positions. So somebody has to say that it holds experts: its name or its module's does, or
a router beside it has exactly as many outputs as the tensor has slices.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from torch import Tensor, nn

from gradsight.core.parameters import Named
from gradsight.values.experts import ExpertGroup

_WORDS = ("expert", "moe", "mixture")
_ROUTERS = ("gate", "router", "routing", "switch")


def expert_groups(model: nn.Module, parameters: Sequence[Named]) -> tuple[ExpertGroup, ...]:
    """The experts of a model, in the model's order; empty where it has none."""
    rows = {id(named.tensor): row for row, named in enumerate(parameters)}
    found: dict[str, ExpertGroup] = {}
    for above, path, module in _walk(model):
        groups = _in_list(module, above, path, rows, parameters)
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            groups = _in_tensors(module, above, path, rows, parameters)
        for group in groups:
            found.setdefault(group.name, group)
    return tuple(found.values())


def _walk(model: nn.Module) -> Iterator[tuple[nn.Module | None, tuple[str, ...], nn.Module]]:
    """Every module with the one above it and the parts of its name."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parts = tuple(name.split(".")) if name else ()
        yield modules.get(".".join(parts[:-1])) if parts else None, parts, module


def _in_tensors(
    owner: nn.Module,
    above: nn.Module | None,
    path: tuple[str, ...],
    rows: dict[int, int],
    parameters: Sequence[Named],
) -> list[ExpertGroup]:
    """The tensors [E, ...] of one module."""
    # What torch's own layers keep in three dimensions are kernels.
    if _own_class(owner).__module__.startswith("torch."):
        return []
    own = {name: tensor for name, tensor in owner._parameters.items() if id(tensor) in rows}
    sizes = set()
    for name, tensor in own.items():
        if tensor is None or tensor.dim() < 3 or tensor.shape[0] < 2:
            continue
        size = tensor.shape[0]
        named = _are_named_experts(owner, above, (*path, name))
        if (named and _agrees(owner, above, size)) or _has_router(owner, above, size):
            sizes.add(size)
    groups = []
    for tensor in own.values():
        # Biases [E, d] are the experts' own where matrices [E, ...] stand beside them.
        is_theirs = tensor is not None and tensor.dim() >= 2 and tensor.shape[0] in sizes
        if tensor is not None and is_theirs and not _is_router(owner, tensor):
            row = rows[id(tensor)]
            groups.append(ExpertGroup(parameters[row].name, tensor.shape[0], row))
    return groups


def _own_class(module: nn.Module) -> type:
    """The class of a module as it was written: FSDP2 puts one of its own in front of it."""
    return next(each for each in type(module).__mro__ if not each.__name__.startswith("FSDP"))


def _in_list(
    modules: nn.Module,
    above: nn.Module | None,
    path: tuple[str, ...],
    rows: dict[int, int],
    parameters: Sequence[Named],
) -> list[ExpertGroup]:
    """A list of modules that are alike, one for each expert."""
    if not isinstance(modules, (nn.ModuleList, nn.ModuleDict)) or len(modules) < 2:
        return []
    children = list(modules.children())
    shapes = {
        tuple((name, each.shape) for name, each in child.named_parameters()) for child in children
    }
    if len(children) < 2 or len(shapes) > 1 or not next(iter(shapes)):
        return []
    named = bool(path) and _says(path[-1])
    if not named and not _has_router(modules, above, len(children)):
        return []
    tensors = [list(child.parameters()) for child in children]
    if not all(id(tensor) in rows for each in tensors for tensor in each):
        return []
    members = tuple(tuple(rows[id(tensor)] for tensor in each) for each in tensors)
    # Experts that share their weights have no gradient of their own.
    if len({row for each in members for row in each}) < sum(map(len, members)):
        return []
    first, second = (parameters[each[0]].name.split(".") for each in members[:2])
    common = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    name = ".".join(part for part, _ in common)
    return [ExpertGroup(name or "experts", len(children), None, members)]


def _says(name: str) -> bool:
    return any(word in name.lower() for word in _WORDS)


def _are_named_experts(owner: nn.Module, above: nn.Module | None, path: tuple[str, ...]) -> bool:
    """Whether a name on the way to a tensor, or a class around it, speaks of experts."""
    said = [place for place, part in enumerate(path) if _says(part)]
    if said:
        # `experts.3.kernel` is a part of one expert, not of all of them.
        return not any(part.isdigit() for part in path[said[-1] + 1 :])
    # The class of a whole model says nothing of a layer deep inside of it.
    around = [owner] if above is None or len(path) <= 2 else [owner, above]
    return any(_says(type(module).__name__) for module in around)


def _agrees(owner: nn.Module, above: nn.Module | None, size: int) -> bool:
    """Whether the number of experts, where the modules keep one, is that of the slices."""
    numbers = set()
    for module in (owner, above):
        for name, value in vars(module).items() if module is not None else ():
            if "exp" in name.lower() and type(value) is int and value > 1:
                numbers.add(value)
    return not numbers or size in numbers


def _has_router(owner: nn.Module, above: nn.Module | None, size: int) -> bool:
    """Whether a router with so many outputs stands beside: in the same module, or above it."""
    for module in (owner, above):
        for name, child in module.named_children() if module is not None else ():
            if not any(word in name.lower() for word in _ROUTERS):
                continue
            last = [each for each in child.parameters() if each.dim() == 2][-1:]
            if last and size in last[0].shape:
                return True
    return _own_router(owner, size) or (above is not None and _own_router(above, size))


def _own_router(module: nn.Module, size: int) -> bool:
    named = [
        tensor
        for name, tensor in module._parameters.items()
        if tensor is not None and any(word in name.lower() for word in _ROUTERS)
    ]
    return any(tensor.dim() == 2 and size in tensor.shape for tensor in named)


def _is_router(owner: nn.Module, tensor: Tensor) -> bool:
    """Whether a matrix is the router itself, by its name: `gate_proj` is a part of an expert."""
    names = [name for name, each in owner._parameters.items() if each is tensor]
    return tensor.dim() == 2 and any(
        word in name.lower() and "proj" not in name.lower() for name in names for word in _ROUTERS
    )
