"""docs/seeds.md is what the tests of this folder say of each line of the seeds."""

import pytest

from examples import seed_lines


@pytest.fixture(autouse=True)
def _collected() -> None:
    seed_lines.collect()


def test_the_page_is_what_the_tests_say() -> None:
    assert seed_lines.PAGE.read_text() == seed_lines.page(), (
        "docs/seeds.md is out of date: python tests/examples/seed_lines.py"
    )


def test_every_seed_has_lines_and_every_line_says_what_became_of_it() -> None:
    assert {line.seed for line in seed_lines.LINES} == seed_lines.SEEDS.keys()
    for line in seed_lines.LINES:
        assert line.line
        assert line.how
        assert "\n" not in line.line + line.how
    named = [(line.seed, line.line) for line in seed_lines.LINES]
    assert len(named) == len(set(named)), "a line stands twice in the table"
