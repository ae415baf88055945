"""The time that a diagnosis may take."""

import time


class OutOfTime(BaseException):
    """The time is over; not an Exception, so that no model's own `except Exception` keeps it."""


class Budget:
    """Counts from its making."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = time.perf_counter()

    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._start

    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.spent() > self.seconds

    def check(self) -> None:
        """Stop the work here if the time is over."""
        if self.is_over():
            raise OutOfTime
