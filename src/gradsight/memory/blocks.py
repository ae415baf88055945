"""The repeated blocks of a model: what activation checkpointing is applied to."""

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from gradsight.core.parameters import unwrapped
from gradsight.errors import UsageError

Named = tuple[str, nn.Module]
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(model: nn.Module, blocks: Sequence[str] | None = None) -> list[Named]:
    """The model's blocks with their names, in the order of definition.

    Hugging Face layers that can checkpoint themselves are taken as they are. Else a block is a
    module with parts and parameters that has a sibling of its class, the outermost such; siblings
    in lists go before siblings that are attributes.
    """
    model = unwrapped(model)
    if blocks is not None:
        return _by_name(model, blocks)
    found = (
        _declared(model) or _repeated(model, lists_only=True) or _repeated(model, lists_only=False)
    )
    if not found:
        raise UsageError(
            f"no repeated blocks found in {type(model).__name__}: a block is a module with parts and "
            f"parameters that stands beside another of its class. Name them, for example blocks={_suggestion(model)}"
        )
    return found


def _by_name(model: nn.Module, names: Sequence[str]) -> list[Named]:
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


def _declared(model: nn.Module) -> list[Named]:
    """Layers of Hugging Face models that are built to be checkpointed, the outermost."""
    found = [
        (n, m)
        for n, m in model.named_modules()
        if any(c.__name__ == "GradientCheckpointingLayer" for c in type(m).__mro__)
    ]
    return _outermost(found) if len(found) > 1 else []


def _repeated(module: nn.Module, prefix: str = "", *, lists_only: bool) -> list[Named]:
    """Siblings of one class, looked for from the outside in."""
    children = [(f"{prefix}{name}", child) for name, child in module.named_children()]
    chosen: list[Named] = []
    if isinstance(module, LISTS) or not lists_only:
        counts = Counter(type(child) for _, child in children if _can_be_block(child))
        if any(count > 1 for count in counts.values()):
            chosen = [
                (n, c)
                for n, c in children
                if _can_be_block(c) and (counts[type(c)] > 1 or isinstance(module, nn.ModuleList))
            ]
    taken = {
        name
        for name, child in chosen
        if not (isinstance(child, nn.Sequential) and _repeated(child, lists_only=True))
    }
    found: list[Named] = []
    for name, child in children:
        found += (
            [(name, child)]
            if name in taken
            else _repeated(child, f"{name}.", lists_only=lists_only)
        )
    return found


def _can_be_block(module: nn.Module) -> bool:
    """Whether a module can be called, has parts, and has something to train."""
    callable_ = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    return (
        callable_
        and any(True for _ in module.children())
        and any(p.requires_grad for p in module.parameters())
    )


def _outermost(found: Iterable[Named]) -> list[Named]:
    kept: list[Named] = []
    for name, module in found:
        if not kept or not name.startswith(f"{kept[-1][0]}."):
            kept.append((name, module))
    return kept


def _suggestion(model: nn.Module) -> list[str]:
    """Names that could be meant: the children with parameters."""
    return [
        name for name, child in model.named_children() if any(True for _ in child.parameters())
    ][:3] or ["name"]
