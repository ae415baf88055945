"""Experts in report.md, and how many looks of a long run are kept."""

import numpy as np
import pytest

from gradsight.show.experts import ExpertNorms, expert_table, experts_of
from gradsight.show.page.sections import expert_section


class Looked:
    def __init__(self, looks: list[tuple[int, str, list[float]]]) -> None:
        self.looks = looks

    def expert_looks(self) -> list[tuple[int, str, list[float]]]:
        return self.looks


def test_the_table_of_a_report() -> None:
    run = Looked([(0, "h.0.experts.w1", [1.0, 1.0]), (50, "h.0.experts.w1", [3.0, 0.0])])
    text = "\n".join(expert_table(experts_of(run)))
    assert "| `h.0.experts.w1` | 2 | 1 | 0 | 1.41 |" in text
    assert expert_table({}) == []


def test_a_long_run_is_thinned_and_keeps_its_first_look() -> None:
    group = experts_of(Looked([(step, "a", [1.0, float(step)]) for step in range(1000)]))["a"]
    assert 80 <= len(group.steps) <= 160
    assert group.steps[0] == 0
    assert np.unique(np.diff(group.steps)).tolist() == [8]


def test_shares_are_of_an_even_norm() -> None:
    group = ExpertNorms([0, 1], [[1e200, 1e200], [3.0, 4.0]])
    shares = group.shares()
    assert shares[0].tolist() == [1.0, 1.0]
    assert shares[1, 1] / shares[1, 0] == pytest.approx(4 / 3)
    assert np.square(shares[1]).mean() == pytest.approx(1)


def test_what_is_not_finite_or_not_there_has_a_code(recwarn: pytest.WarningsRecorder) -> None:
    group = ExpertNorms([0, 1], [[np.nan, 1.0], [0.0, 0.0]])
    (section,) = expert_section({"a": group})
    assert (section["size"], section["steps"]) == (2, [0, 1])
    assert not recwarn.list
