"""The repeated blocks of a model: what activation checkpointing is applied to."""

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from gradsight.core.parameters import unwrapped
from gradsight.errors import UsageError

NamedModule = tuple[str, nn.Module]
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(model: nn.Module, blocks: Sequence[str] | None = None) -> list[NamedModule]:
    """The model's blocks with their names, in the order of definition.

    Hugging Face layers that can checkpoint themselves are taken as they are. Else a block is a
    module with parts and parameters that has a sibling of its class, the outermost such; siblings
    in lists go before siblings that are attributes.
    """
    model = unwrapped(model)
    if blocks is not None:
        return _by_name(model, blocks)
    chosen = _declared(model)
    if not chosen:
        chosen = _repeated(model, lists_only=True)
    if not chosen:
        chosen = _repeated(model, lists_only=False)
    if not chosen:
        raise UsageError(
            f"no repeated blocks found in {type(model).__name__}: a block is a module with parts "
            "and parameters that stands beside another of its class. Name them, for example "
            f"blocks={_suggestion(model)} (to a command: --blocks {','.join(_suggestion(model))})"
        )
    return chosen


def _by_name(model: nn.Module, names: Sequence[str]) -> list[NamedModule]:
    """The modules of the given names, each of which must exist and none lie in another."""
    if isinstance(names, str) or not names:
        raise UsageError(f"blocks must be a list of module names, got {names!r}")
    modules = dict(model.named_modules())
    if unknown := [name for name in names if name not in modules]:
        raise UsageError(
            f"the model has no module {unknown[0]!r}; it has {', '.join(list(modules)[1:9])}, ..."
        )
    for name in names:
        if inside := [other for other in names if other != name and other.startswith(f"{name}.")]:
            raise UsageError(
                f"blocks must not lie in one another: {inside[0]!r} is a part of {name!r}"
            )
    return [(name, modules[name]) for name in dict.fromkeys(names)]


def _declared(model: nn.Module) -> list[NamedModule]:
    """Layers of Hugging Face models that are built to be checkpointed, the outermost."""
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
    ]
    if len(layers) < 2:
        return []
    return _outermost(layers)


def _repeated(module: nn.Module, prefix: str = "", *, lists_only: bool) -> list[NamedModule]:
    """Siblings of one class, looked for from the outside in."""
    siblings = _siblings(module, lists_only)
    blocks: list[NamedModule] = []
    for name, child in module.named_children():
        if name in siblings and not _is_stage(child):
            blocks.append((f"{prefix}{name}", child))
        else:
            blocks += _repeated(child, f"{prefix}{name}.", lists_only=lists_only)
    return blocks


def _siblings(module: nn.Module, lists_only: bool) -> set[str]:
    """The children that stand beside another of their class; of a ModuleList then all of them."""
    if lists_only and not isinstance(module, LISTS):
        return set()
    children = [(name, child) for name, child in module.named_children() if _can_be_block(child)]
    counts = Counter(type(child) for _, child in children)
    repeated = {name for name, child in children if counts[type(child)] > 1}
    if repeated and isinstance(module, nn.ModuleList):
        return {name for name, _ in children}
    return repeated


def _is_stage(module: nn.Module) -> bool:
    """Whether a module is a Sequential of blocks, such as a stage of a convolutional network."""
    return isinstance(module, nn.Sequential) and bool(_repeated(module, lists_only=True))


def _can_be_block(module: nn.Module) -> bool:
    """Whether a module can be called, has parts, and has something to train."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    has_parts = any(True for _ in module.children())
    return has_parts and any(parameter.requires_grad for parameter in module.parameters())


def _outermost(modules: Iterable[NamedModule]) -> list[NamedModule]:
    """Those that lie in none of the others."""
    kept: list[NamedModule] = []
    for name, module in modules:
        if not kept or not name.startswith(f"{kept[-1][0]}."):
            kept.append((name, module))
    return kept


def _suggestion(model: nn.Module) -> list[str]:
    """Names that could be meant: the first children with parameters."""
    names = [
        name for name, child in model.named_children() if any(True for _ in child.parameters())
    ]
    return names[:3] or ["name"]
