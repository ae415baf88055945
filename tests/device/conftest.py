"""The simulated device is in every process that collects these tests, and in no other.

So they are run by themselves: torch cannot forget a device, and processes that have one cannot be
forked once a backward pass has run.
"""

from device.fixtures import device

__all__ = ["device"]
