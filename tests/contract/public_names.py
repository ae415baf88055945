"""Lists the public Python names of Gradsight: signatures, defaults, members and fields.

Module names are left out of types: a class may move, its name may not change. Classes that users
only get from Gradsight (as a return value, or as a field of one) are found by following return
types, so a new public type appears here without being listed by hand.
"""

import dataclasses
import functools
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from typing import Any

import gradsight

WIDTH = 100

INTEGRATIONS = {
    "accelerate": ["GradsightTracker", "register", "watch"],
    "hf": ["GradsightCallback", "MemoryMonitorCallback", "register"],
    "lightning": ["GradsightCallback", "MemoryMonitorCallback"],
}
"""The names in `gradsight.integrations` that the documentation uses."""
NOT_PUBLIC = {
    "AcceleratedWatch": {"before_backward", "go_on_at"},
    "GhostEngine": {"abandon", "loss_fn", "model", "root"},
    "GradientDumper": {
        *("capture", "commit", "discard", "dump_alone", "is_closed", "stage", "wants"),
        *("wants_finding", "dump_on", "enabled", "failed", "schedule", "skipped", "written"),
    },
    "GradsightCallback": {"close", "micro_batch", "numbers_for_the_log", "training_step"},
    "Run": {
        *("expert_looks", "histogram_steps", "histograms_at", "measured_parameters"),
        *("measured_steps", "next_step", "score_table", "stat_chunks"),
    },
    "Watch": {
        *("add_optimizer", "also_optimized_by", "also_writes_to", "asked_to_stop"),
        *(
            "compare_networks",
            "finish_steps",
            "give_way",
            "go_to",
            "is_incomplete",
            "is_open",
            "log_under_way",
            "problems",
        ),
        *("script_failed", "step_to_log", "step_under_way"),
    },
}
"""Members that other parts of Gradsight call and that no documentation mentions."""


def lines() -> Iterator[str]:
    """Yield one line per public name, member and field."""
    reached: dict[str, type] = {}
    for name in sorted(gradsight.__all__):
        yield from _name("gradsight", name, getattr(gradsight, name), reached)
    for trainer, names in INTEGRATIONS.items():
        module = getattr(gradsight.integrations, trainer)
        for name in names:
            yield from _name(
                f"gradsight.integrations.{trainer}", name, getattr(module, name), reached
            )
    public = set(map(id, map(functools.partial(getattr, gradsight), gradsight.__all__)))
    listed: set[str] = set()
    while names := sorted(reached.keys() - listed):
        for name in names:
            listed.add(name)
            if id(reached[name]) not in public:
                yield from _class(f"returned: {name}", reached[name], reached)


def _name(module: str, name: str, value: Any, reached: dict[str, type]) -> Iterator[str]:
    place = f"{module}.{name}"
    if not inspect.isclass(value):
        yield from _signature(place, value, reached)
    elif dataclasses.is_dataclass(value) or issubclass(value, Exception):
        yield from _class(place, value, reached)
    else:
        constructor = list(_signature(place, value.__init__, reached, bound=True))
        constructor[-1] = constructor[-1].removesuffix(" -> None")
        yield from constructor[:-1]
        yield from _class(constructor[-1], value, reached)


def _class(title: str, kind: type, reached: dict[str, type]) -> Iterator[str]:
    bases = [base.__name__ for base in kind.__mro__[1:] if issubclass(base, Exception)]
    yield title + (f" is a {', '.join(bases)}" if bases else "")
    if dataclasses.is_dataclass(kind):
        for each in dataclasses.fields(kind):
            _follow(_hints(kind).get(each.name, each.type), reached)
            yield f"    {each.name}: {_type(each.type)}{_default_of_field(each)}"
    for name, member in sorted(_members(kind).items()):
        if isinstance(member, property | functools.cached_property):
            getter: Any = member.fget if isinstance(member, property) else member.func
            _follow(_hints(getter).get("return"), reached)
            yield f"    .{name} -> {_type(inspect.signature(getter).return_annotation)}"
        elif callable(member):
            yield from _signature(f"    .{name}", member, reached, bound=True)


def _members(kind: type) -> dict[str, Any]:
    """Return the public methods and properties that Gradsight defines.

    Methods that a base class of another package prescribes (a Trainer's callbacks) are left out:
    the trainer calls them, not the user.
    """
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        for name, member in vars(base).items():
            if name.startswith("_") or inspect.isclass(member):
                continue
            if not base.__module__.startswith("gradsight"):
                found[name] = None
            elif name not in found or found[name] is not None:
                found[name] = getattr(member, "__func__", member)
    hidden = {*getattr(kind, "__dataclass_fields__", ()), *NOT_PUBLIC.get(kind.__name__, ())}
    return {
        name: member for name, member in found.items() if member is not None and name not in hidden
    }


class _Text:
    """An annotation that is printed as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _signature(
    name: str, function: Any, reached: dict[str, type], bound: bool = False
) -> Iterator[str]:
    """Yield a function with its arguments, on several lines if one is too long."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if bound and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    parameters = [each for each in parameters if not each.name.startswith("_")]
    _follow(_hints(function).get("return"), reached)
    shown = [
        each
        if each.annotation is inspect.Parameter.empty
        else each.replace(annotation=_Text(_type(each.annotation)))
        for each in parameters
    ]
    result = signature.return_annotation
    result = "" if result is inspect.Signature.empty else f" -> {_type(result)}"
    text = str(inspect.Signature(shown))
    line = re.sub(r" at 0x[0-9a-f]+", "", f"{name}{text}{result}")
    if len(line) <= WIDTH:
        yield line
        return
    indent = " " * (len(name) - len(name.lstrip()))
    yield f"{name}("
    kinds = {each.kind for each in shown}
    keyword_only = inspect.Parameter.KEYWORD_ONLY in kinds
    keyword_only &= inspect.Parameter.VAR_POSITIONAL not in kinds
    for each in shown:
        if keyword_only and each.kind is inspect.Parameter.KEYWORD_ONLY:
            yield f"{indent}    *,"
            keyword_only = False
        yield f"{indent}    {re.sub(r' at 0x[0-9a-f]+', '', str(each))},"
    yield f"{indent}){result}"


def _hints(value: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(value)
    except NameError:  # imported for type checkers only
        modules = [
            each for name, each in sorted(sys.modules.items()) if name.startswith("gradsight.")
        ]
        known = {
            name: each
            for module in modules
            for name, each in vars(module).items()
            if inspect.isclass(each)
        }
        try:
            return typing.get_type_hints(value, localns=known)
        except NameError:
            return {}
    except TypeError:
        return {}


def _follow(hint: Any, reached: dict[str, type]) -> None:
    """Remember the classes of Gradsight in a type."""
    if inspect.isclass(hint) and hint.__module__.startswith("gradsight"):
        reached[hint.__name__] = hint
    for part in typing.get_args(hint):
        _follow(part, reached)


def _type(annotation: Any) -> str:
    """Return a type as text, without modules and without the quotes of forward references."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"'([A-Z]\w*)'|~", r"\1", text)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=\w)", "", text)


def _default_of_field(each: Any) -> str:
    if each.default is not dataclasses.MISSING:
        return f" = {each.default!r}"
    if each.default_factory is not dataclasses.MISSING:
        return f" = {each.default_factory.__name__}()"
    return ""
