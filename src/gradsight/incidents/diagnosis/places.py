"""Where the program is: the innermost module of the model and the line of source that matters to
its user.
"""

import linecache
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

import torch.utils.checkpoint
from torch import nn

from gradsight.core.parameters import clean_name
from gradsight.core.source import owner_of

_HERE = os.path.dirname(os.path.abspath(__file__))
_CALL = nn.Module._call_impl.__code__
_CHECKPOINT = torch.utils.checkpoint.__file__
BOUNDARY = os.path.join(_HERE, "rerun.py")
"""The file whose functions call the model: frames outside of it are not the model's."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A point in a pass."""

    module: str | None
    """The innermost module of the model; None outside of it."""
    file: str | None
    line: int
    recomputed: bool
    """Whether activation checkpointing runs the forward pass again."""

    @property
    def place(self) -> str | None:
        """File and line."""
        return f"{self.file}:{self.line}" if self.file else None


def module_names(root: nn.Module) -> dict[int, str]:
    """The model's own dotted name of every module, by identity; the model itself is ""."""
    return {
        id(module): clean_name(root, name) if name else "" for name, module in root.named_modules()
    }


def look(names: Mapping[int, str]) -> Scene:
    """The scene of the running operation: the user's innermost line in the model, or else the
    innermost one of a library.
    """
    module: str | None = None
    user: FrameType | None = None
    library: FrameType | None = None
    recomputed = False
    for frame in _frames():
        code = frame.f_code
        if code is _CALL and module is None:
            module = names.get(id(frame.f_locals.get("self")))
        recomputed = recomputed or code.co_filename == _CHECKPOINT
        owner = owner_of(code.co_filename)
        if owner == "user" and user is None:
            user = frame
        elif owner in ("library", "made up") and library is None:
            library = frame
    chosen = user or library
    if chosen is None:
        return Scene(module, None, 0, recomputed)
    return Scene(module, chosen.f_code.co_filename, chosen.f_lineno, recomputed)


def _frames() -> Iterator[FrameType]:
    """The frames between the running operation and our call of the model, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != BOUNDARY:
        yield frame
        frame = frame.f_back


def source_of(place: str | None) -> str | None:
    """The text of a line given as "file:line"; None where it cannot be read."""
    file, _, line = (place or "").rpartition(":")
    return (linecache.getline(file, int(line)).strip() or None) if file and line.isdigit() else None
