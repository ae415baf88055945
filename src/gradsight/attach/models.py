"""Which of the modules alive an optimizer trains, and what the script calls them."""

import gc
import sys
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gradsight.attach.names import has_variable, part_names
from gradsight.core.optimizers import innermost_optimizer
from gradsight.core.source import owner_of


def roots() -> list[nn.Module]:
    """Every module alive that is not part of another."""
    # By type: isinstance would ask objects for their __class__, and lazy proxies would load.
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inner = set()
    for module in modules:
        # A library puts the user's module into one of its own, maybe for a single call.
        if not _is_internal(module):
            inner |= {id(child) for child in module.__dict__.get("_modules", {}).values()}
    return [
        module
        for module in modules
        if id(module) not in inner
        and "_parameters" in module.__dict__  # else its constructor has not run yet
        and not _is_internal(module)
    ]


def _is_internal(module: nn.Module) -> bool:
    """Return whether it is of a library's private class and holds no parameter itself."""
    kind = type(module)
    if not kind.__name__.startswith("_") or any(module.__dict__.get("_parameters", {}).values()):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return isinstance(file, str) and owner_of(file) == "library"


def models_of(
    optimizer: Optimizer, candidates: Sequence[nn.Module]
) -> tuple[list[nn.Module], list[Tensor]]:
    """The fewest candidates that hold the optimizer's parameters, and those that none holds."""
    wanted = {id(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}
    held = [(model, {id(tensor) for tensor in model.parameters()}) for model in candidates]
    chosen = []
    while wanted and held:
        # Of those that hold as many, the smallest: a model rather than a box of several.
        model, ids = max(held, key=lambda pair: (len(pair[1] & wanted.keys()), -len(pair[1])))
        if not ids & wanted.keys():
            break
        chosen.append(model)
        wanted = {key: tensor for key, tensor in wanted.items() if key not in ids}
    return chosen, list(wanted.values())


def without_average(model: nn.Module, optimizer: Optimizer) -> nn.Module:
    """Return the trained child if a module holds only that child and averaged copies of it.

    Return the module itself otherwise. The script has its own variable for the child.
    """
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    trained = {id(tensor) for tensor in model.parameters()} & held
    children = [each for each in model.children() if next(each.parameters(), None) is not None]
    if len(children) < 2 or any(each is not None for each in model._parameters.values()):
        return model
    online = next(
        (each for each in children if trained <= {id(tensor) for tensor in each.parameters()}), None
    )
    if online is None:
        return model
    mine = {id(tensor) for tensor in online.parameters()}
    shapes = _shapes(online)
    for other in children:
        if other is not online and (
            any(tensor.requires_grad or id(tensor) in mine for tensor in other.parameters())
            or _shapes(other) != shapes
        ):
            return model
    return online if has_variable(online) else model


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {
        name: () if is_lazy(tensor) else tuple(tensor.shape)
        for name, tensor in module.named_parameters()
    }


def has_scheduler(optimizer: Optimizer) -> bool:
    """Whether a scheduler sets this optimizer's learning rate."""
    # Every scheduler but one notes where it began. The mark on `optimizer.step` would not do: one
    # that is made for a wrapper, as Accelerate's, leaves it there.
    if any("initial_lr" in group for group in optimizer.param_groups):
        return True
    plateaus = [each for each in gc.get_objects() if type(each) is ReduceLROnPlateau]
    return any(innermost_optimizer(each.optimizer) is optimizer for each in plateaus)


def together(models: Sequence[nn.Module], tensors: Sequence[Tensor]) -> nn.Module:
    """One module with these models and tensors under the script's names; a lone model is itself."""
    if len(models) == 1 and not tensors:
        return models[0]
    box = nn.Module()
    names = iter(part_names(models, tensors))
    for model in models:
        box.add_module(next(names).replace(".", "_"), model)
    for tensor in tensors:
        box._parameters[next(names)] = tensor  # type: ignore[assignment]
    return box
