"""What a first look depends on beside the run: time."""

import contextlib

import pytest


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lift the time limit of the first look, for busy machines; without the module, do nothing."""
    with contextlib.suppress(ImportError):
        from gradsight.session import first_look

        monkeypatch.setattr(first_look, "_LEAST_SECONDS", 60.0)
