"""CUDA's caching allocator, replayed: what it takes from the device for a log of allocations.

Its rules are torch's defaults: sizes are multiples of 512 bytes; up to 1 MiB they come from
segments of 2 MiB, below 10 MiB from segments of 20 MiB, and larger ones from segments of their own,
in multiples of 2 MiB. A free block is the best fit, the rest of it stays free, and neighbours join.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from gradsight.memory.counter import Allocation

GRANULE = 512
MIB = 1 << 20
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE = 10 * MIB
LARGE_SEGMENT = 20 * MIB
ROUND_LARGE = 2 * MIB


@dataclass(slots=True)
class _Block:
    """A piece of a segment; neighbours are those beside it in the same segment."""

    size: int
    small: bool
    free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


class CachingAllocator:
    """Segments of a device's memory and the blocks in them; segments are never given back."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: list[_Block] = []

    def take(self, size: int) -> _Block:
        """A block for an allocation."""
        size = -(-max(size, 1) // GRANULE) * GRANULE
        small = size <= SMALL
        fitting = [each for each in self._free if each.small == small and each.size >= size]
        if not fitting:
            fitting = [self._new_segment(size, small)]
        block = min(fitting, key=lambda each: each.size)
        self._free.remove(block)
        block.free = False
        rest = block.size - size
        if rest >= (GRANULE if small else SMALL + 1):
            self._split(block, size)
        return block

    def give_back(self, block: _Block) -> None:
        """Free a block; it joins with free neighbours."""
        block.free = True
        self._free.append(block)
        if block.after is not None and block.after.free:
            self._join(block, block.after)
        if block.before is not None and block.before.free:
            self._join(block.before, block)

    def _new_segment(self, size: int, small: bool) -> _Block:
        if small:
            segment = SMALL_SEGMENT
        elif size < LARGE:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        self.reserved += segment
        block = _Block(segment, small)
        self._free.append(block)
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size = size
        self._free.append(rest)

    def _join(self, first: _Block, second: _Block) -> None:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        self._free.remove(second)


def reserved_range(log: Iterable[Allocation], peak: int) -> tuple[int, int]:
    """What the allocator reserves: at least the peak in whole segments, at most as replayed.

    Replayed from a fresh start and without giving anything back, which is torch's own order of
    events; under pressure the allocator frees cached segments before it gives up.
    """
    allocator = CachingAllocator()
    entries = list(log)
    events = [(entry.born, 1, number) for number, entry in enumerate(entries) if entry.size]
    for number, entry in enumerate(entries):
        if entry.size and entry.died is not None:
            events.append((entry.died, 0, number))
    taken: dict[int, _Block] = {}
    for _, born, number in sorted(events):
        if born:
            taken[number] = allocator.take(entries[number].size)
        elif number in taken:
            allocator.give_back(taken.pop(number))
    least = -(-peak // ROUND_LARGE) * ROUND_LARGE
    return least, max(least, allocator.reserved)
