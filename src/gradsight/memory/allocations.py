"""The slow twin of the counter: what the allocator itself did, from the profiler's memory events."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocator_peak(fn: Callable[[], Any]) -> int:
    """The highest rise of CPU memory above its level at the start of fn, operators' own scratch
    included.
    """
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        fn()
    results: Any = profiler.profiler.kineto_results
    moves = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]"
    )
    level = peak = 0
    for _, size in moves:
        level += size
        peak = max(peak, level)
    return peak
