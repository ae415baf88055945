"""Notebooks: a cell that is run again closes the watch that it left behind.

In a script a second watch of the same run is a mistake, and an error. In a notebook the first one
is what the last run of the cell has left, and nobody holds it any more: it would record the new
training a second time, or keep its run directory from the new one.
"""

import sys
import weakref
from pathlib import Path
from typing import Protocol

from torch import nn

from gradsight.core.notices import notice
from gradsight.core.parameters import unwrapped


class ClosableWatch(Protocol):
    """A watch."""

    def close(self) -> None:
        """Write what is left; closing again does nothing."""


class _Opened:
    """A watch, and what it watches; held by nobody."""

    def __init__(self, watch: ClosableWatch, model: nn.Module, run_dir: Path | None) -> None:
        self.watch = weakref.ref(watch)
        self.model = weakref.ref(model)
        self.run_dir = run_dir

    def is_of(self, model: nn.Module, run_dir: Path | None) -> bool:
        """Whether it watches this model, or writes to this directory."""
        same_place = run_dir is not None and run_dir == self.run_dir
        return same_place or self.model() is model


_opened: list[_Opened] = []


def in_notebook() -> bool:
    """Whether cells are what runs here, in a notebook or in IPython's shell."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def close_left_behind(model: object, run_dir: object) -> None:
    """In a notebook, close the watches of this model and those that write to this directory."""
    if not in_notebook() or not isinstance(model, nn.Module):
        return
    place = _place(run_dir)
    inner = unwrapped(model)
    for each in [each for each in _opened if each.is_of(inner, place)]:
        _opened.remove(each)
        watch = each.watch()
        if watch is not None and not getattr(watch, "_closed", True):
            notice("this cell was run before: the watch that it left open is closed now")
            watch.close()


def remember(watch: ClosableWatch, model: nn.Module, run_dir: object) -> None:
    """A watch has been opened."""
    _opened[:] = [each for each in _opened if each.watch() is not None]
    _opened.append(_Opened(watch, unwrapped(model), _place(run_dir)))


def _place(run_dir: object) -> Path | None:
    return None if run_dir is None else Path(str(run_dir)).resolve()
