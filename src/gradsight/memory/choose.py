"""The cheapest way to stay under a limit of memory, block by block: numbers, no torch, no model.

Blocks run forward in order and backward in reverse. While block i runs forward, everything that
blocks 0..i-1 hold is alive; while it runs backward, everything that blocks 0..i hold is. So a
choice is walked from the first block on with what is held so far as its only state, and of two
partial choices the one that holds no more and costs no more is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BUCKETS = 2048
"""How finely held bytes are told apart; in one bucket only the cheapest partial choice is kept."""


@dataclass(frozen=True, slots=True)
class BlockOption:
    """One block in one mode, in bytes and operations."""

    held: int
    """What it adds to the bytes alive from its forward to its backward."""
    forward: int
    """The highest rise while it runs forward."""
    backward: int
    """The highest level in its backward, above the start and all that blocks up to it hold."""
    cost: int
    """Operations that are run a second time."""


@dataclass(frozen=True, slots=True)
class BlockProblem:
    """A model's blocks and what surrounds them."""

    start: int
    """Bytes alive when the first block starts."""
    around: int
    """The peak of whatever does not depend on the blocks: before the first, and the optimizer."""
    head: int
    """The highest rise between the last block's forward and its backward."""
    blocks: Sequence[Sequence[BlockOption]]


Choice = tuple[int, ...]
Partial = tuple[int, int, tuple[Any, int] | None]
"""The cost of a choice for the first blocks, what they hold, and the choice as a chain.

A chain and not a tuple, so that nothing is copied for each option that is tried.
"""


def peak_of(problem: BlockProblem, choice: Choice) -> int:
    """The peak of a choice of one option for each block.

    >>> keep = BlockOption(held=10, forward=12, backward=3, cost=0)
    >>> redo = BlockOption(held=1, forward=12, backward=13, cost=5)
    >>> problem = BlockProblem(start=100, around=0, head=4, blocks=[[keep, redo]] * 2)
    >>> peak_of(problem, (0, 0)), peak_of(problem, (1, 0)), peak_of(problem, (1, 1))
    (124, 115, 115)
    """
    held = problem.start
    peak = problem.around
    for options, number in zip(problem.blocks, choice, strict=True):
        option = options[number]
        peak = max(peak, held + option.forward)
        held += option.held
        peak = max(peak, held + option.backward)
    return max(peak, held + problem.head)


def cost_of(problem: BlockProblem, choice: Choice) -> int:
    """Operations that a choice runs a second time."""
    return sum(options[number].cost for options, number in zip(problem.blocks, choice, strict=True))


def cheapest(problem: BlockProblem, limit: int, buckets: int = BUCKETS) -> Choice | None:
    """The choice of least cost whose peak is at most the limit; None where there is none."""
    if problem.around > limit:
        return None
    width = max(1, (limit - problem.start) // buckets)
    partial: dict[int, Partial] = {0: (0, problem.start, None)}
    for options in problem.blocks:
        following: dict[int, Partial] = {}
        for cost, held, chosen in partial.values():
            for number, option in enumerate(options):
                after = held + option.held
                if held + option.forward > limit:
                    continue
                # All that is held up to here is still alive at the head, so that must fit as well.
                if after + max(option.backward, problem.head) > limit:
                    continue
                bucket = (after - problem.start) // width
                if bucket not in following or (cost + option.cost, after) < following[bucket][:2]:
                    following[bucket] = (cost + option.cost, after, (chosen, number))
        partial = _without_dominated(following)
    if not partial:
        return None
    best = min(partial.values(), key=lambda entry: entry[:2])
    return _unlinked(best[2])


def _unlinked(chain: tuple[Any, int] | None) -> Choice:
    """A chain of choices, last one first, as a tuple in the order of the blocks."""
    numbers = []
    while chain is not None:
        chain, number = chain
        numbers.append(number)
    return tuple(reversed(numbers))


def _without_dominated(partial: dict[int, Partial]) -> dict[int, Partial]:
    """The partial choices without those that hold more and cost no less than another."""
    kept: dict[int, Partial] = {}
    least_cost: int | None = None
    for bucket in sorted(partial):
        cost = partial[bucket][0]
        if least_cost is None or cost < least_cost:
            kept[bucket] = partial[bucket]
            least_cost = cost
    return kept


def lowest(problem: BlockProblem, rounds: int = 14) -> Choice:
    """The choice of least peak, by halving the interval of limits."""
    best = tuple(_index_of_least_held(options) for options in problem.blocks)
    too_low = 0
    reached = peak_of(problem, best)
    for _ in range(rounds):
        middle = (too_low + reached) // 2
        choice = cheapest(problem, middle, buckets=256)
        if choice is None:
            too_low = middle
        else:
            best = choice
            reached = peak_of(problem, choice)
    return best


def _index_of_least_held(options: Sequence[BlockOption]) -> int:
    return min(range(len(options)), key=lambda number: options[number].held)
