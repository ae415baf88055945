"""What a first look depends on beside the run: time."""

import pytest

from gradsight.session import first_look


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_look, "_LEAST_SECONDS", 60.0)
