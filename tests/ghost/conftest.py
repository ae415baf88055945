"""What all tests of the engine share."""

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from gradsight import GhostEngine


@pytest.fixture(autouse=True)
def _engines_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every engine after its test: an engine that is left open sees the next test's steps."""
    engines: weakref.WeakSet[GhostEngine] = weakref.WeakSet()
    make = GhostEngine.__init__

    @functools.wraps(make)
    def make_and_keep(engine: GhostEngine, *args: Any, **options: Any) -> None:
        make(engine, *args, **options)
        engines.add(engine)

    monkeypatch.setattr(GhostEngine, "__init__", make_and_keep)
    yield
    for engine in list(engines):
        engine.close()
