"""The trainer that runs the training loop: its users set arguments and write no loop."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

Library = Literal["transformers", "lightning"]
_MODULES: dict[str, Library] = {
    "transformers.trainer": "transformers",
    "lightning.pytorch": "lightning",
    "pytorch_lightning": "lightning",
}


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a trainer's users set instead of writing a loop."""

    library: Library
    settings: str
    """The class that takes the settings, such as SFTConfig."""
    sets_rate: bool = False
    """Whether the learning rate is one of these settings."""


def trainer_of(groups: Sequence[Mapping[str, Any]]) -> Trainer | None:
    """Return the trainer that this code is called from; None for a loop of the user's.

    groups: the parameter groups of the optimizers that it trains with.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        for module, library in _MODULES.items():
            if name == module or name.startswith(f"{module}."):
                return _described(library, frame.f_locals.get("self"), groups)
        frame = frame.f_back
    return None


def _described(library: Library, trainer: Any, groups: Sequence[Mapping[str, Any]]) -> Trainer:
    if library == "lightning":
        return Trainer(library, "Trainer")
    arguments = getattr(trainer, "args", None)
    if arguments is None:
        return Trainer(library, "TrainingArguments")
    # An optimizer that was given to the Trainer has a learning rate of its own.
    rate = getattr(arguments, "learning_rate", None)
    rates = {group.get("initial_lr", group.get("lr")) for group in groups}
    return Trainer(library, type(arguments).__name__, rates == {rate})
