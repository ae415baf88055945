"""Integrations with other trainers: one module for each, imported when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsight.integrations import accelerate as accelerate
    from gradsight.integrations import hf as hf
    from gradsight.integrations import lightning as lightning

_TRAINERS = ["accelerate", "hf", "lightning"]


def __dir__() -> list[str]:
    return _TRAINERS


# Hidden from type checkers: to them, a module with `__getattr__` has every name, as Any.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _TRAINERS:
            known = ", ".join(_TRAINERS)
            raise AttributeError(f"there is no integration {name!r}; there are {known}")
        return import_module(f"gradsight.integrations.{name}")
