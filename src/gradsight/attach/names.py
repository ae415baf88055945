"""What a script calls its models and tensors: the names that appear in reports and as folders."""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from gradsight.core import rundir
from gradsight.core.parameters import unwrapped
from gradsight.core.source import owner_of, users_frames

_DEPTH = 3
"""Attributes of attributes are searched to this depth."""
_OBJECTS = 300
"""Objects that are searched for each frame of the script."""
_SHOWN = 3
"""Models of one optimizer that are all named; of more, the first two are."""
_RESERVED = {rundir.INCIDENTS, rundir.DUMPS, rundir.SCORES, rundir.CHECKPOINTS, rundir.TENSORBOARD}


def name_of(
    models: Sequence[nn.Module], tensors: Sequence[Tensor], taken: Iterable[str] = ()
) -> str:
    """Return a name for models and lone tensors that one optimizer trains, unlike those taken."""
    used = _RESERVED | {name.lower() for name in taken}
    if len(models) + len(tensors) == 1:
        names = [*_names_of_model(models[0])] if models else [*_names_of_tensor(tensors[0])]
    else:
        parts = part_names(models, tensors)
        if len(parts) > _SHOWN:
            parts = [*parts[:2], f"{len(parts) - 2}more"]
        names = ["+".join(parts)]
    free = (name for name in names if name.lower() not in used)
    return next(free, None) or _numbered(names[0], used)


def part_names(models: Sequence[nn.Module], tensors: Sequence[Tensor]) -> list[str]:
    """Return a name for each, all different."""
    names: list[str] = []
    for model in models:
        names.append(name_of([model], [], names))
    for tensor in tensors:
        names.append(name_of([], [tensor], names))
    return names


def variable_of(thing: object) -> str | None:
    """Return the expression by which the innermost of the user's frames reaches an object.

    Such as `critic` or `self.critic`; None if it is held by no variable.
    """
    return next((path for path, _ in _paths(thing)), None)


def has_variable(module: nn.Module) -> bool:
    """Return whether a variable or an attribute of the script refers to a module directly.

    A reference through the parent module does not count.
    """
    return any("._modules[" not in path for path, _ in _paths(module))


def _names_of_model(model: nn.Module) -> Iterator[str]:
    inner = unwrapped(model)
    is_named = False
    for each in _with_the_same_parameters(model):
        for name in _variables(each):
            is_named = True
            yield name
    # Linear says less than the variable with a number.
    if not is_named or _is_users(type(inner)):
        yield type(inner).__name__


def _with_the_same_parameters(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and its inner modules that hold all of its parameters, outermost first.

    A library may wrap the script's model in a loss module that no variable refers to. The search
    stops at the first module whose class the script defines.
    """
    count = sum(1 for _ in model.parameters())
    inner: nn.Module | None = model
    while inner is not None:
        yield inner
        parts = () if _is_users(type(inner)) else inner.children()
        inner = next((each for each in parts if sum(1 for _ in each.parameters()) == count), None)


def _names_of_tensor(tensor: Tensor) -> Iterator[str]:
    yield from _variables(tensor)
    yield "parameter"


def _variables(thing: object) -> Iterator[str]:
    for _, name in _paths(thing):
        if not name.startswith("_"):
            yield name


def _numbered(name: str, used: set[str]) -> str:
    number = 2
    while f"{name}{number}".lower() in used:
        number += 1
    return f"{name}{number}"


def _paths(thing: object) -> Iterator[tuple[str, str]]:
    """Yield expressions that reach an object, each with the name in it that says the most."""
    for frame in users_frames():
        variables = dict(frame.f_locals)
        if frame.f_globals is not frame.f_locals:
            variables |= {
                name: value for name, value in frame.f_globals.items() if name not in variables
            }
        for name, value in variables.items():
            if value is thing and name not in ("self", "_"):
                yield name, name
        yield from _inside(thing, variables)


def _inside(thing: object, variables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how an object is reached through attributes and containers, the nearest first."""
    found = 0
    seen: set[int] = set()
    level = [(name, name, value) for name, value in variables.items() if _is_open(value)]
    for _ in range(_DEPTH):
        deeper = []
        for path, name, value in level:
            if id(value) in seen or found > _OBJECTS:
                continue
            seen.add(id(value))
            found += 1
            for inner_path, inner_name, inner in _parts(path, name, value):
                if inner is thing:
                    yield inner_path, inner_name
                elif _is_open(inner):
                    deeper.append((inner_path, inner_name, inner))
        level = deeper


def _parts(path: str, name: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield what a container or an object of the user's holds: expression, name, object."""
    if isinstance(value, Mapping):
        for key, inner in islice(value.items(), _OBJECTS):
            plain = re.sub(r"\W+", "_", str(key))[:40]
            yield f"{path}[{key!r}]", plain if plain.isidentifier() else name + plain, inner
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value[:_OBJECTS]):
            yield f"{path}[{number}]", f"{name}{number}", inner
    else:
        for attribute, inner in list(vars(value).items()):
            yield f"{path}.{attribute}", attribute, inner


def _is_open(value: Any) -> bool:
    """Return whether to search an object: a plain container, or of a class of the user's."""
    # By type: isinstance would ask objects for their __class__, and lazy proxies would load.
    kind = type(value)
    if kind in (dict, list, tuple):
        return True
    if kind is type or not hasattr(kind, "__dict__") or not _is_users(kind):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _is_users(kind: type) -> bool:
    if kind.__module__ == "__main__":
        return True
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and owner_of(file) == "user"
