"""Where the program is: the innermost module of the model and the line of source that matters to
its user.
"""

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType

import torch
from torch import nn

from gradsight.core.parameters import clean_name

_HERE = os.path.dirname(os.path.abspath(__file__))
_OURS = os.path.dirname(os.path.dirname(_HERE)) + os.sep
_OUR_MODELS = os.path.join(_OURS, "train") + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_CALL = nn.Module._call_impl.__code__
_CHECKPOINT = os.path.join(_TORCH, "utils", "checkpoint.py")
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
        kind = _kind(code.co_filename)
        if kind == "user" and user is None:
            user = frame
        elif kind == "library" and library is None:
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


@lru_cache(maxsize=1024)
def _kind(file: str) -> str:
    if file.startswith(_OURS):
        return "user" if file.startswith(_OUR_MODELS) else "ours"
    if file.startswith((_TORCH, "<frozen")):
        return "torch"
    if "site-packages" in file or "dist-packages" in file:
        return "library"
    return "torch" if file.startswith(_PYTHON) else "user"


def source_of(place: str | None) -> str | None:
    """The text of a line given as "file:line"; None where it cannot be read."""
    file, _, line = (place or "").rpartition(":")
    return (linecache.getline(file, int(line)).strip() or None) if file and line.isdigit() else None
