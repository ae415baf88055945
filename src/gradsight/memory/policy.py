"""The language of checkpointing policies: what every block keeps and what it recomputes.

    none                     keeps everything
    full                     keeps the block's inputs, recomputes the rest
    selective                also keeps the results of matrix products, convolutions and attention
    selective@R              keeps those whose recomputation costs R operations per byte or more

A policy is one of these for all blocks, `first:K` (full for the first K blocks), or a list that
names blocks by number, such as "full:0-5,selective@512:6-9"; blocks that no item names keep
everything.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from gradsight.errors import UsageError
from gradsight.values.memory import CheckpointingPlan

KINDS = ("none", "full", "selective")
MOST_BLOCKS = 10_000
"""More than any model has."""


@dataclass(frozen=True, slots=True)
class Mode:
    """What one block does."""

    kind: str = "none"
    threshold: float = 0.0
    """Of selective: the least number of operations per byte for which a result is kept."""

    def __str__(self) -> str:
        if self.threshold:
            return f"{self.kind}@{self.threshold:g}"
        return self.kind


NONE = Mode("none")
FULL = Mode("full")
SELECTIVE = Mode("selective")


def parse_policy(policy: str | CheckpointingPlan, count: int) -> list[Mode]:
    """The mode of each of `count` blocks.

    >>> [str(mode) for mode in parse_policy("full:0-1,selective@512:2", 4)]
    ['full', 'full', 'selective@512', 'none']
    """
    if isinstance(policy, CheckpointingPlan):
        policy = policy.policy
    if not isinstance(policy, str):
        raise UsageError(
            f"a policy is text or a CheckpointingPlan, got {type(policy).__name__}; {_known()}"
        )
    # The first blocks and not the last: what a late block keeps is needed soonest. Of 16 blocks the
    # first 8 took a peak of 366 MiB to 230, the last 8 to 244, and the very last one saved nothing.
    if first := re.fullmatch(r"first:([0-9]+)", policy.strip()):
        length = int(first[1])
        _check_range(length - 1, count, policy)
        return [FULL] * length + [NONE] * (count - length)
    modes: list[Mode | None] = [None] * count
    for item in policy.split(","):
        mode, start, stop = _parse_item(item.strip(), policy, count)
        for number in range(start, stop):
            if modes[number] is not None:
                raise UsageError(f"the policy {policy!r} names block {number} twice")
            modes[number] = mode
    return [mode or NONE for mode in modes]


def refuse_nonsense(policy: str) -> None:
    """Refuse what is no policy for any model; torch is not needed to tell."""
    parse_policy(policy, MOST_BLOCKS)


def _parse_item(item: str, policy: str, count: int) -> tuple[Mode, int, int]:
    """One item's mode and the range of blocks it names."""
    parts = re.fullmatch(r"([a-z]+)(?:@([0-9.e+-]+))?(?::([0-9]+)(?:-([0-9]+))?)?", item)
    if parts is None or parts[1] not in KINDS or (parts[2] and parts[1] != "selective"):
        raise UsageError(f"{policy!r} is not a policy; {_known()}")
    try:
        threshold = float(parts[2] or 0)
    except ValueError:
        threshold = math.nan
    if not 0 <= threshold < math.inf:
        raise UsageError(
            f"{policy!r} is not a policy: {parts[2]!r} is not a number of operations per byte"
        )
    mode = Mode(parts[1], threshold)
    if parts[3] is None:
        return mode, 0, count
    start = int(parts[3])
    last = int(parts[4] or start)
    if last < start:
        raise UsageError(
            f"the policy {policy!r} has a range that ends before it starts: {parts[3]}-{parts[4]}"
        )
    _check_range(last, count, policy)
    return mode, start, last + 1


def _check_range(last: int, count: int, policy: str) -> None:
    if last >= count:
        raise UsageError(
            f"the policy {policy!r} names block {last}, but the model has {count} blocks, "
            "numbered from 0"
        )


def _known() -> str:
    return (
        "known are 'full', 'selective', 'selective@R', 'none', 'first:K' and lists: "
        "'full:0-5,selective:6'"
    )


def policy_text(modes: Sequence[Mode]) -> str:
    """The shortest text that parses to these modes.

    >>> policy_text([FULL, FULL, SELECTIVE, NONE]), policy_text([FULL, FULL])
    ('full:0-1,selective:2', 'full')
    """
    if len(set(modes)) == 1:
        return str(modes[0])
    runs = [
        (mode, [number for number, _ in run])
        for mode, run in groupby(enumerate(modes), key=lambda pair: pair[1])
    ]
    named = [(mode, numbers) for mode, numbers in runs if mode != NONE]
    if len(named) == 1:
        mode, numbers = named[0]
        if mode == FULL and numbers[0] == 0:
            return f"first:{len(numbers)}"
    return ",".join(_item_text(mode, numbers) for mode, numbers in named)


def _item_text(mode: Mode, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{mode}:{numbers[0]}"
    return f"{mode}:{numbers[0]}-{numbers[-1]}"
