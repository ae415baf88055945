"""Which of the modules alive an optimizer trains, and what the script calls them."""

import gc
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gradsight.core.optimizers import innermost_optimizer
from gradsight.core.source import users_frames


def roots() -> list[nn.Module]:
    """Every module alive that is not part of another."""
    # By type: isinstance would ask objects for their __class__, and lazy proxies would load.
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inner = set()
    for module in modules:
        inner |= {id(child) for child in module.__dict__.get("_modules", {}).values()}
    return [
        module
        for module in modules
        if id(module) not in inner
        and "_parameters" in module.__dict__  # else its constructor has not run yet
    ]


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
    model_names = distinct(variable_name(model) for model in models)
    for model, name in zip(models, model_names, strict=True):
        box.add_module(name, model)
    tensor_names = distinct(variable_name(tensor, "parameter") for tensor in tensors)
    for tensor, name in zip(tensors, tensor_names, strict=True):
        box._parameters[name] = tensor  # type: ignore[assignment]
    return box


def distinct(names: Iterable[str]) -> list[str]:
    """The same names, numbered where they repeat.

    >>> distinct(["net", "net", "head"])
    ['net', 'net2', 'head']
    """
    result: list[str] = []
    for name in names:
        number = 2
        unique = name.replace(".", "_")
        while unique in result:
            unique = f"{name}{number}"
            number += 1
        result.append(unique)
    return result


def variable_name(thing: object, fallback: str | None = None) -> str:
    """The variable that holds this in one of the user's running frames, else its class's name."""
    for frame in users_frames():
        for variables in (frame.f_locals, frame.f_globals):
            for name, value in list(variables.items()):
                if value is thing and not name.startswith("_") and name != "self":
                    return name
    return fallback or type(thing).__name__
