"""Which models an optimizer trains, found among the modules that are alive, and what the script
calls them.
"""

import gc
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.core.source import users_frames


def roots() -> list[nn.Module]:
    """Every module alive that is not part of another."""
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    inner = {
        id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()
    }
    return [
        module for module in modules if id(module) not in inner and "_parameters" in module.__dict__
    ]


def models_of(
    optimizer: Optimizer, candidates: Sequence[nn.Module]
) -> tuple[list[nn.Module], list[Tensor]]:
    """The fewest candidates that hold this optimizer's parameters, and the parameters that none of
    them holds.
    """
    wanted = {id(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}
    held = [(model, {id(tensor) for tensor in model.parameters()}) for model in candidates]
    chosen = []
    while wanted:
        best = max(
            held, key=lambda pair: (len(pair[1] & wanted.keys()), -len(pair[1])), default=None
        )
        if best is None or not best[1] & wanted.keys():
            break
        chosen.append(best[0])
        wanted = {key: tensor for key, tensor in wanted.items() if key not in best[1]}
    return chosen, list(wanted.values())


def together(models: Sequence[nn.Module], tensors: Sequence[Tensor]) -> nn.Module:
    """One module that holds these models and single tensors under the script's names for them; a
    lone model is itself.
    """
    if len(models) == 1 and not tensors:
        return models[0]
    box = nn.Module()
    for model, name in zip(models, distinct(name_of(model) for model in models), strict=True):
        box.add_module(name, model)
    for tensor, name in zip(
        tensors, distinct(name_of(tensor, "parameter") for tensor in tensors), strict=True
    ):
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
            unique, number = f"{name}{number}", number + 1
        result.append(unique)
    return result


def name_of(thing: object, fallback: str | None = None) -> str:
    """The variable that holds this in one of the frames that are running, else the name of its
    class.
    """
    for frame in users_frames():
        for variables in (frame.f_locals, frame.f_globals):
            for name, value in list(variables.items()):
                if value is thing and not name.startswith("_") and name != "self":
                    return name
    return fallback or type(thing).__name__
