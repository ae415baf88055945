"""Where a pass is: the innermost module of the model, and the line that matters to its user."""

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

_CALL = nn.Module._call_impl.__code__
_CHECKPOINT = torch.utils.checkpoint.__file__
BOUNDARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rerun.py")
"""The file whose functions call the model: frames outside of it are not the model's."""


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A point in a pass: a module and a line of source."""

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


NOWHERE = SourcePlace(None, None, 0, recomputed=False)


def module_names(root: nn.Module) -> dict[int, str]:
    """The model's own dotted name of every module, by identity; the model itself is ""."""
    names = {id(root): ""}
    for name, module in root.named_modules():
        if name:
            names[id(module)] = clean_name(root, name)
    return names


def current_place(names: Mapping[int, str]) -> SourcePlace:
    """The running operation's place: the user's innermost line in the model, else a library's."""
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
        return SourcePlace(module, None, 0, recomputed)
    return SourcePlace(module, chosen.f_code.co_filename, chosen.f_lineno, recomputed)


def _frames() -> Iterator[FrameType]:
    """The frames between the running operation and our call of the model, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != BOUNDARY:
        yield frame
        frame = frame.f_back


def source_of(place: str | None) -> str | None:
    """The text of a line given as "file:line"; None where it cannot be read."""
    file, _, line = (place or "").rpartition(":")
    if not file or not line.isdigit():
        return None
    return linecache.getline(file, int(line)).strip() or None
