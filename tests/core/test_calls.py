"""A recorded call does not change, and passes of ours can be told from training."""

from dataclasses import FrozenInstanceError

import pytest

from gradsight.core.calls import RecordedCall, is_suspended, suspended


def test_a_recorded_call_is_frozen() -> None:
    call = RecordedCall((), {}, {}, {}, None, True, None)
    with pytest.raises(FrozenInstanceError):
        call.training = False  # type: ignore[misc]


def test_suspensions_nest_and_end_with_an_error() -> None:
    assert not is_suspended()
    with suspended():
        with pytest.raises(ValueError), suspended():
            raise ValueError
        assert is_suspended()
    assert not is_suspended()
