"""What all tests of the engine share."""

from collections.abc import Iterator

import pytest

from gradsight.core import moments


@pytest.fixture(autouse=True)
def _engines_left_open_hear_nothing_more() -> Iterator[None]:
    """An engine listens until it is closed, and most tests have no use for that."""
    before = list(moments._listeners)
    yield
    for listener in list(moments._listeners):
        if not any(listener is each for each in before):
            moments.leave(listener)
