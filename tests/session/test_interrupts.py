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
    differences,
    functions,
    leave_out_threads_of_others,
    name_of,
    state,
)

TRIES = 12
OF_THE_LOOP = ("weights", "random numbers")
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
    leave_out_threads_of_others()
    watched = LOOPS[loop]
    found = functions(watched)
    choose = random.Random(8)
    wrong = []
    for code in choose.sample(sorted(found, key=name_of), TRIES):
        planter = Planter(code, choose.randint(1, found[code]), KeyboardInterrupt())
        untouched = Subject.make(watched.optimizer)
        before = {
            name: value for name, value in state(untouched).items() if name not in OF_THE_LOOP
        }
        arrived, subject = interrupted(loop, planter, next(folders))
        changed = differences(before, state(subject))
        if arrived != planter.raised or changed:
            wrong.append(f"{name_of(code)}: arrived: {arrived}, left changed: {changed}")
    assert wrong == []


@pytest.mark.filterwarnings("ignore")
def test_a_new_watch_works_after_an_interrupt(folders: Iterator[Path]) -> None:
    watched = LOOPS["optimizer"]
    found = {name_of(code): code for code in functions(watched)}
    for name in ("measure/norms.py:NormReading.__init__", "measure/update.py:UpdateReading.finish"):
        arrived, _ = interrupted(
            "optimizer", Planter(found[name], 2, KeyboardInterrupt()), next(folders)
        )
        assert arrived
        again = next(folders)
        subject = Subject.make(watched.optimizer)
        with watched.dumper(again) as dumper:
            watched.loop(subject, watched.open(subject, again, dumper))
        assert [step.step for step in gradsight.open_run(again).steps()] == list(range(STEPS))
