"""Whose a source file is, and the user's own line in a stack of frames."""

import os
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
_PYTHON = f"{Path(sysconfig.get_paths()['stdlib']).resolve()}/"


# Remembered, because every call of a watched model asks for the user's line.
@lru_cache(maxsize=4096)
def owner_of(filename: str) -> Owner:
    """Return whose file this is, also where the file is reached through symbolic links.

    The reference trainer's files are a user's: they are a training script.

    >>> owner_of("/home/me/train.py"), owner_of("<string>"), owner_of(torch.nn.__file__)
    ('user', 'made up', 'torch')
    """
    if filename.startswith("<"):
        return "python" if filename.startswith("<frozen") else "made up"
    real = os.path.realpath(filename)
    if real.startswith(_OURS):
        return "user" if real.startswith(_TRAINER) else "ours"
    if real.startswith(_TORCH):
        return "torch"
    # The given name: a package manager may link the files of a package to its cache.
    if "site-packages" in filename or "dist-packages" in filename:
        return "library"
    return "python" if real.startswith(_PYTHON) else "user"


def users_frames() -> Iterator[FrameType]:
    """The frames of the stack that are the user's own, the innermost first."""
    frame = _users_frame(sys._getframe(1))
    while frame is not None:
        yield frame
        frame = _users_frame(frame.f_back)


def users_place() -> tuple[str, int] | None:
    """File and line of the innermost frame that is the user's own."""
    frame = _users_frame(sys._getframe(1))
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def users_line() -> str | None:
    """The same as "file:line"."""
    place = users_place()
    return None if place is None else f"{place[0]}:{place[1]}"


def working_line() -> str | None:
    """ "file:line" of the innermost frame of the user's or of a library that is not torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and owner_of(frame.f_code.co_filename) not in ("user", "library"):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """This frame or the nearest one around it that is the user's own."""
    while frame is not None and owner_of(frame.f_code.co_filename) != "user":
        frame = frame.f_back
    return frame
