"""The devices that tests run on."""

from collections.abc import Iterator

import pytest
import torch

from device.simulated import register, simulated

# Now: autograd's engine counts devices at the first backward pass of the process.
register()


@pytest.fixture(params=["cpu", "simulated"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The CPU, and an accelerator on which nothing is done before somebody waits for it."""
    if request.param == "cpu":
        yield torch.device("cpu")
        return
    with simulated() as there:
        yield there.device
