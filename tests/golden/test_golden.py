"""The results of every case equal the recorded ones. `record.py` says how to change them."""

from collections.abc import Callable
from typing import Any

import pytest

from golden import weights
from golden.groups import GROUPS
from golden.results import fixed_settings


def cases() -> list[Any]:
    """Return group and case of every test, the long ones marked as slow."""
    return [
        pytest.param(
            name, case, id=f"{name}-{case}", marks=[pytest.mark.slow] * (case in group.slow)
        )
        for name, group in GROUPS.items()
        for case in group.cases
    ]


@pytest.mark.parametrize(("group", "case"), cases())
def test_result_equals_the_recorded_one(group: str, case: str) -> None:
    one = GROUPS[group]
    stored = one.stored()
    assert case in stored, f"no result is recorded: run tests/golden/record.py {group}"
    differences = one.differences(case, stored[case], one.run(case))
    assert not differences, "\n".join(["", *differences])


@pytest.mark.parametrize("group", GROUPS)
def test_no_result_is_recorded_for_a_case_that_is_gone(group: str) -> None:
    assert GROUPS[group].stored().keys() == GROUPS[group].cases.keys()


@pytest.mark.parametrize("train", weights.RUNS.values(), ids=weights.RUNS)
def test_weights_are_the_same_with_and_without_gradsight(train: Callable[[bool], Any]) -> None:
    with fixed_settings():
        plain, watched = train(False), train(True)
    differing = [
        f"parameter {number}: {one.flatten()[:3].tolist()} without Gradsight, "
        f"{other.flatten()[:3].tolist()} with it"
        for number, (one, other) in enumerate(zip(plain, watched, strict=True))
        if weights.sha256(one) != weights.sha256(other)
    ]
    assert plain
    assert not differing, differing
