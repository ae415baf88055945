"""Blocks that are equal need not be weighed one by one: one step has each of them in another mode.

A model of 48 equal blocks and seven modes is weighed in one step beside the plain one, instead of
seven. What a mode changes in one block it changes in all that are equal to it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradsight.memory.choose import BlockOption, BlockProblem
from gradsight.memory.fake_steps import (
    FakeStep,
    FakeSteps,
    one_after_the_other,
    option_of,
    problem_around,
)
from gradsight.memory.policy import NONE, Mode
from gradsight.memory.workload import StepFailed


def problem_by_samples(steps: FakeSteps, modes: Sequence[Mode]) -> BlockProblem | None:
    """The blocks' weights in each mode from a few of them; None where too few are equal.

    The first mode is the one that keeps everything.
    """
    plain = steps.uniform(NONE)
    if not one_after_the_other(plain.times):
        return None
    options = [option_of(plain, number) for number in range(len(steps.blocks))]
    usual = _equal_blocks(options)
    others = modes[1:]
    # With fewer, as many steps as modes would be needed.
    if len(usual) < 2 * len(others) and len(usual) < len(options) - 2:
        return None
    if len(usual) < 4 or any(option.cost != options[usual[0]].cost for option in options):
        return None
    changes: list[BlockOption] = []
    try:
        for group in _groups(others, len(usual)):
            changes += _changes(steps, options, dict(zip(usual, group, strict=False)))
    except StepFailed:
        return None  # a mode that does not work on this model: the long way finds out which
    rows = [[option, *(_changed(option, change) for change in changes)] for option in options]
    return problem_around(steps, rows)


def _equal_blocks(options: Sequence[BlockOption]) -> list[int]:
    """The largest set of blocks that hold, need and cost the same.

    What lies beside their backward differs: gradients of later blocks are there already.
    """
    alike: dict[tuple[int, int, int], list[int]] = {}
    for number, option in enumerate(options):
        alike.setdefault((option.held, option.forward, option.cost), []).append(number)
    return max(alike.values(), key=len)


def _groups(modes: Sequence[Mode], size: int) -> Iterator[Sequence[Mode]]:
    """The modes, as many at a time as there are blocks to try them on."""
    for start in range(0, len(modes), size):
        yield modes[start : start + size]


def _changes(
    steps: FakeSteps, plain: Sequence[BlockOption], sampled: dict[int, Mode]
) -> list[BlockOption]:
    """What each mode changes, from one step that has it in one block."""
    modes = [sampled.get(number, NONE) for number in range(len(plain))]
    step: FakeStep = steps.run(modes)
    changes = []
    for number in sampled:
        found = option_of(step, number)
        before = plain[number]
        changes.append(
            BlockOption(
                held=found.held - before.held,
                forward=found.forward - before.forward,
                backward=found.backward - before.backward,
                cost=found.cost - before.cost,
            )
        )
    return changes


def _changed(option: BlockOption, change: BlockOption) -> BlockOption:
    """A block's option in a mode, from what the mode changes in a block equal to it."""
    return replace(
        option,
        held=option.held + change.held,
        forward=option.forward + change.forward,
        backward=option.backward + change.backward,
        cost=option.cost + change.cost,
    )
