"""The largest batch that fits into a given memory."""

from collections.abc import Callable

from gradsight.errors import UsageError
from gradsight.memory.predict import predict_peak_memory
from gradsight.memory.workload import Build
from gradsight.values.memory import CheckpointingPlan

LIMIT = 1 << 20


def largest_batch(
    build_for: Callable[[int], Build],
    memory: int,
    *,
    policy: str | CheckpointingPlan | None = None,
    optimizer: str | None = "adamw",
    device: str = "cpu",
) -> int:
    """The largest batch size whose predicted peak is at most `memory` bytes; 0 where not even one
    sample fits.
    """

    def peak(size: int) -> int:
        return predict_peak_memory(
            build_for(size), policy=policy, optimizer=optimizer, device=device
        ).peak_bytes

    return largest(peak, memory)


def largest(peak: Callable[[int], int], memory: int) -> int:
    """The largest size whose peak fits, for a peak that grows with the size, in few calls of it.

    The peak is a maximum of straight lines, so the line through two known points is a good guess at
    the next one.

    >>> largest(lambda size: max(500, 100 + 7 * size), 1000)
    128
    """
    if memory < 1:
        raise UsageError(f"memory must be above zero, got {memory}")
    known: dict[int, int] = {}
    low, high = 0, LIMIT
    size = 1
    while high - low > 1:
        known[size] = peak(size)
        low, high = (size, high) if known[size] <= memory else (low, size)
        size = min(max(_guess(known, memory, low), low + 1), high - 1)
    return low


def _guess(known: dict[int, int], memory: int, low: int) -> int:
    """Where the line through the two known points around the limit, or the two last below it, meets
    the limit.
    """
    above = [size for size in sorted(known) if known[size] > memory]
    below = [size for size in sorted(known) if known[size] <= memory]
    points = (below[-1:] + above[:1]) if above and below else below[-2:]
    if len(points) < 2 or known[points[1]] == known[points[0]]:
        return 8 * low  # as long as something else than the batch makes the peak
    first, second = points
    return first + (memory - known[first]) * (second - first) // (known[second] - known[first])
