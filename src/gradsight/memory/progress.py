"""How long work tells of its progress: whoever listens is called with a line; nobody need."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("memory_progress", default=None)


@contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Inside, every line of progress is handed to the listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(line: str) -> None:
    """Say what is being done now."""
    listener = _listener.get()
    if listener is not None:
        listener(line)
