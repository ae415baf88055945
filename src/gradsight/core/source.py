"""Whose a source file is, and the user's own line in a stack of frames."""

import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

Owner = Literal["user", "library", "python", "torch", "ours", "made up"]

_OURS = f"{Path(__file__).resolve().parents[1]}/"
_TRAINER = f"{_OURS}train/"
_TORCH = f"{Path(torch.__file__).resolve().parent}/"
_PYTHON = f"{sysconfig.get_paths()['stdlib']}/"


# Remembered, because every call of a watched model asks for the user's line.
@lru_cache(maxsize=4096)
def owner_of(filename: str) -> Owner:
    """Whose file this is. The reference trainer's files are a user's: they are a training script.

    >>> owner_of("/home/me/train.py"), owner_of("<string>"), owner_of(torch.nn.__file__)
    ('user', 'made up', 'torch')
    """
    if filename.startswith("<"):
        return "python" if filename.startswith("<frozen") else "made up"
    if filename.startswith(_OURS):
        return "user" if filename.startswith(_TRAINER) else "ours"
    if filename.startswith(_TORCH):
        return "torch"
    if "site-packages" in filename or "dist-packages" in filename:
        return "library"
    return "python" if filename.startswith(_PYTHON) else "user"


def users_frames() -> Iterator[FrameType]:
    """The frames of the stack that are the user's own, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if owner_of(frame.f_code.co_filename) == "user":
            yield frame
        frame = frame.f_back


def users_place() -> tuple[str, int] | None:
    """File and line of the innermost frame that is the user's own."""
    for frame in users_frames():
        return frame.f_code.co_filename, frame.f_lineno
    return None


def users_line() -> str | None:
    """The same as "file:line"."""
    place = users_place()
    return None if place is None else f"{place[0]}:{place[1]}"
