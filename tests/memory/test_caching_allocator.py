"""The replay of CUDA's caching allocator, against its documented rules worked out by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from gradsight import predict_peak_memory
from gradsight.memory.caching_allocator import MIB, CachingAllocator, reserved_range
from gradsight.memory.counter import Allocation


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB, MIB, 1], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([9 * MIB, 9 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 9 * MIB], 40 * MIB),
        ([11 * MIB], 12 * MIB),
    ],
)
def test_segments(sizes: list[int], reserved: int) -> None:
    allocator = CachingAllocator()
    for size in sizes:
        allocator.take(size)
    assert allocator.reserved == reserved


def test_what_is_freed_is_used_again() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.take(6 * MIB) for _ in range(3)]
    for block in blocks:
        allocator.give_back(block)
    allocator.take(9 * MIB)  # only as the neighbours have joined
    allocator.take(9 * MIB)
    assert allocator.reserved == 20 * MIB


def test_fragmentation_is_in_the_range() -> None:
    """A block of 40 MiB does not fit where two of 20 were."""
    log = [
        Allocation(20 * MIB, 0, "forward", "cpu", died=2),
        Allocation(20 * MIB, 1, "forward", "cpu", died=3),
        Allocation(40 * MIB, 4, "forward", "cpu"),
    ]
    assert reserved_range(log, 40 * MIB) == (40 * MIB, 80 * MIB)


def test_a_prediction_states_it(make_gpt: Callable[..., Any]) -> None:
    use = predict_peak_memory(make_gpt, device="cuda")
    assert use.reserved is not None
    assert use.peak_bytes <= use.reserved[0] <= use.reserved[1]
    assert predict_peak_memory(make_gpt).reserved is None
