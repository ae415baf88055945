"""The repeated blocks of a model: what activation checkpointing is applied to."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from gradsight.core.parameters import type_name, unwrapped
from gradsight.errors import UsageError
from gradsight.values.memory import CheckpointingPlan
from gradsight.values.plain import nearest

NamedModule = tuple[str, nn.Module]
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
ACTIVATIONS_PER_INPUT = 10
"""What a usual block keeps for backward, in sizes of its input: 10 to 16 in transformers."""


class NoBlocks(UsageError):
    """A model's structure shows no blocks; a step of it may (`called_blocks`)."""


def find_blocks(model: nn.Module, blocks: Sequence[str] | None = None) -> list[NamedModule]:
    """The model's blocks with their names, in the order of definition.

    Hugging Face layers that can checkpoint themselves are taken as they are. Else a block is a
    module with parts and parameters that has a sibling of its class, the outermost such; siblings
    in lists go before siblings that are attributes. Stages give way to the blocks in them where
    that needs less memory. The last resort is a list of one block, as ALBERT has.
    """
    model = unwrapped(model)
    if blocks is not None:
        return _by_name(model, blocks)
    chosen = _declared(model) or _once(_repeated(model, lists_only=True))
    if chosen:
        return inside_of_stages(chosen)
    chosen = _once(_repeated(model, lists_only=False)) or _lists_of_one(model)
    if not chosen:
        advice = ""
        if names := _suggestion(model):
            advice = f"Name them, for example blocks={names} (to a command: --blocks "
            advice += f"{','.join(names)}). "
        raise NoBlocks(
            f"no repeated blocks found in {type(model).__name__}: a block is a module with parts "
            f"and parameters that stands beside another of its class. {advice}If the model calls "
            "one block several times, check=batch finds it"
        )
    return chosen


def _once(blocks: list[NamedModule]) -> list[NamedModule]:
    """Return every module under its first name, as `named_modules` does."""
    first_names: dict[int, NamedModule] = {}
    for name, module in blocks:
        first_names.setdefault(id(module), (name, module))
    return list(first_names.values())


def _by_name(model: nn.Module, names: Sequence[str]) -> list[NamedModule]:
    """The modules of the given names, each of which must exist and none lie in another."""
    check_names(names)
    modules = dict(model.named_modules())
    names = _without_patterns(names, modules)
    for name in names:
        if not name or name not in modules:
            raise UsageError(
                f"the model has no module {name!r}; {nearest(name, list(modules)[1:])}"
            )
        if names.count(name) > 1:
            raise UsageError(f"blocks names {name!r} twice")
        if isinstance(modules[name], nn.ModuleList | nn.ModuleDict):
            parts = [f"{name}.{part}" for part, _ in modules[name].named_children()]
            raise UsageError(
                f"{name!r} is a {type(modules[name]).__name__}, which is never called itself: "
                f"name its parts, {', '.join(parts[:3])}, ..."
            )
    for name in names:
        if inside := [other for other in names if other != name and other.startswith(f"{name}.")]:
            raise UsageError(
                f"blocks must not lie in one another: {inside[0]!r} is a part of {name!r}"
            )
    return [(name, modules[name]) for name in names]


def _without_patterns(names: Sequence[str], modules: dict[str, nn.Module]) -> list[str]:
    """The names, with the modules that they stand for in place of shell patterns."""
    meant: list[str] = []
    for name in names:
        if name in modules or not any(sign in name for sign in "*?["):
            meant.append(name)
            continue
        matches = _matches(name, modules)
        if not matches:
            raise UsageError(
                f"the model has no module like {name!r}; {nearest(name, list(modules)[1:])}"
            )
        meant += [match for match in matches if match not in meant]
    return meant


def _matches(pattern: str, modules: dict[str, nn.Module]) -> list[str]:
    """The modules of a pattern, component by component: a star does not go beyond a dot.

    Where nothing is found so, it does, and the outermost are taken.
    """
    callable_modules = [
        (name, module)
        for name, module in modules.items()
        if name and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    ]
    parts = pattern.split(".")
    found = []
    for name, _ in callable_modules:
        components = name.split(".")
        pairs = zip(components, parts, strict=False)
        if len(components) == len(parts) and all(fnmatchcase(*pair) for pair in pairs):
            found.append(name)
    if found:
        return found
    anywhere = [named for named in callable_modules if fnmatchcase(named[0], pattern)]
    return [name for name, _ in outermost(anywhere)]


def check_names(names: object) -> None:
    """Refuse what is no list of texts; a set has no order, and an iterator is read only once."""
    expected = "blocks must be a list of module names, as in model.named_modules()"
    if isinstance(names, str | bytes) or not isinstance(names, Sequence) or not names:
        raise UsageError(f"{expected}, got {names!r}")
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"{expected}, got {type_name(name)} among them")


def blocks_meant(policy: object, blocks: Sequence[str] | None) -> Sequence[str] | None:
    """The names of the blocks: those given, or those that a plan was made for."""
    if not isinstance(policy, CheckpointingPlan):
        return blocks
    if blocks is not None:
        check_names(blocks)
        if tuple(blocks) != policy.blocks:
            raise UsageError(
                f"the plan was made for the blocks {', '.join(policy.blocks[:3])}, ... "
                f"({len(policy.blocks)} in all), and its numbers count those. Leave blocks out"
            )
    return policy.blocks


def _declared(model: nn.Module) -> list[NamedModule]:
    """Layers of Hugging Face models that are built to be checkpointed, the outermost."""
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
    ]
    if len(layers) < 2:
        return []
    return outermost(layers)


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
    children = [(name, child) for name, child in module.named_children() if can_be_block(child)]
    counts = Counter(type(child) for _, child in children)
    repeated = {name for name, child in children if counts[type(child)] > 1}
    if repeated and isinstance(module, nn.ModuleList):
        return {name for name, _ in children}
    return repeated


def inside_of_stages(blocks: list[NamedModule]) -> list[NamedModule]:
    """The blocks in the lists of these modules, where checkpointing those needs less memory.

    Which, nobody knows without a step; but a block's activations are some ten times its input, and
    that decides it: many small blocks keep an input each, few large ones recompute all of theirs
    at once.
    """
    inner = [_blocks_in(name, module) for name, module in blocks]
    most = max(len(found) for found in inner)
    additional_inputs = sum(max(len(found), 1) for found in inner) - len(blocks)
    if most < 2 or additional_inputs >= ACTIVATIONS_PER_INPUT * (most - 1):
        return blocks
    chosen: list[NamedModule] = []
    for block, found in zip(blocks, inner, strict=True):
        chosen += found or [block]
    return chosen


def _blocks_in(name: str, module: nn.Module) -> list[NamedModule]:
    """The blocks in a stage's lists: they have norms of their own, which experts have not."""
    found = _repeated(module, f"{name}.", lists_only=True)
    if not all(_has_norm(block) for _, block in found):
        return []
    return found


def _has_norm(module: nn.Module) -> bool:
    return any("Norm" in type(part).__name__ for part in module.modules())


def _lists_of_one(model: nn.Module) -> list[NamedModule]:
    """Modules that are alone in a list of blocks: one that is called again and again."""
    alone = [
        (f"{name}.{key}", child)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == 1
        for key, child in module.named_children()
        if can_be_block(child) and _has_norm(child)
    ]
    return outermost(alone)


def _is_stage(module: nn.Module) -> bool:
    """Whether a module is a Sequential of blocks, such as a stage of a convolutional network."""
    return isinstance(module, nn.Sequential) and bool(_repeated(module, lists_only=True))


def can_be_block(module: nn.Module) -> bool:
    """Whether a module can be called, has parts, and has something to train."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    has_parts = any(True for _ in module.children())
    return has_parts and any(parameter.requires_grad for parameter in module.parameters())


def outermost(modules: Iterable[NamedModule]) -> list[NamedModule]:
    """Those that lie in none of the others."""
    kept: list[NamedModule] = []
    for name, module in modules:
        if not kept or not name.startswith(f"{kept[-1][0]}."):
            kept.append((name, module))
    return kept


def _suggestion(model: nn.Module, prefix: str = "") -> list[str]:
    """Return names that blocks could have: modules side by side that are called and trained."""
    children = [
        (name, child)
        for name, child in _called_children(model, prefix)
        if any(parameter.requires_grad for parameter in child.parameters())
        and not isinstance(child, nn.Embedding | nn.EmbeddingBag)
    ]
    with_parts = [(name, child) for name, child in children if can_be_block(child)]
    if len(with_parts) == 1:
        name, only = with_parts[0]
        if names := _suggestion(only, f"{name}."):
            return names
    if len(with_parts) > 1:
        children = with_parts
    return [name for name, _ in children[:3]] if len(children) > 1 else []


def _called_children(module: nn.Module, prefix: str) -> Iterator[NamedModule]:
    """The children of a module; in place of a list, which is never called, its members."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called_children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
