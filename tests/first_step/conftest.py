"""What a first look depends on beside the run: what the process compiled, and time."""

import pytest
import torch

from gradsight.session import first_look


@pytest.fixture(autouse=True)
def _nothing_compiled_and_time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(first_look, "_LEAST_SECONDS", 60.0)
