"""Ctrl-C in the middle of our code reaches the user, and leaves nothing switched."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradsight
from session.planted_faults import (
    LOOPS,
    STEPS,
    Planter,
    Subject,
    Target,
    differences,
    forget_earlier_threads,
    new_threads,
    state,
    targets,
)

TRIES = 12
OF_THE_LOOP = ("weights", "gradients", "random numbers")
"""What an interrupted loop leaves as it happened to be."""


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    return iter(tmp_path / str(number) for number in range(10**6))


def interrupted(loop: str, planter: Planter, run_dir: Path) -> tuple[bool, Subject]:
    """Whether the interrupt came out of the loop; the user then closes the watch."""
    watched = LOOPS[loop]
    subject = Subject.make(watched.optimizer)
    arrived = False
    with watched.dumper(run_dir) as dumper:
        opened = watched.open(subject, run_dir, dumper)
        # Only this thread: an interrupt is the main thread's.
        sys.setprofile(planter)
        planter.on = True
        try:
            watched.loop(subject, opened)
        except KeyboardInterrupt:
            arrived = True
        finally:
            planter.on = False
            sys.setprofile(None)
        opened.close()
    return arrived, subject


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", ["optimizer", "closure"])
def test_an_interrupt_arrives_and_leaves_nothing_switched(
    loop: str, folders: Iterator[Path]
) -> None:
    watched = LOOPS[loop]
    wrong = []
    for target, number in chosen(loop, TRIES):
        planter = Planter(target, number, KeyboardInterrupt())
        forget_earlier_threads()
        untouched = Subject.make(watched.optimizer)
        before = {
            name: value for name, value in state(untouched).items() if name not in OF_THE_LOOP
        }
        arrived, subject = interrupted(loop, planter, next(folders))
        changed = differences(before, state(subject)) + [each.name for each in new_threads()]
        if arrived != planter.raised or changed:
            wrong.append(f"{target}: arrived: {arrived}, left changed: {changed}")
    assert wrong == []


@pytest.mark.filterwarnings("ignore")
def test_a_new_watch_works_after_an_interrupt(folders: Iterator[Path]) -> None:
    watched = LOOPS["optimizer"]
    arrivals = 0
    for target, number in chosen("optimizer", 4, seed=9):
        planter = Planter(target, number, KeyboardInterrupt())
        arrivals += interrupted("optimizer", planter, next(folders))[0]
        again = next(folders)
        subject = Subject.make(watched.optimizer)
        with watched.dumper(again) as dumper:
            watched.loop(subject, watched.open(subject, again, dumper))
        assert [step.step for step in gradsight.open_run(again).steps()] == list(range(STEPS))
    assert arrivals


def chosen(loop: str, tries: int, seed: int = 8) -> list[tuple[Target, int]]:
    """Choose functions that run below entry points, however deep, and a call of each."""
    found = targets(loop, deep=True)
    choose = random.Random(seed)
    return [
        (target, choose.randint(1, found[target]))
        for target in choose.sample(sorted(found, key=str), tries)
    ]
