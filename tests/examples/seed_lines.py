"""What the five seeds ask for, line by line, beside the test that proves it; docs/seeds.md is
written from it:

    python tests/examples/seed_lines.py
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "seeds.md"
AS_WRITTEN = "as written"
SEEDS = {
    1: "Gradient dumping",
    2: "Gradient dot products",
    3: "Gradient distribution",
    4: "Gradient health",
    5: "Activation checkpointing",
}
_HEAD = """\
# The seeds, line by line

[Back to the README](../README.md)

Gradsight was asked for in five documents. This page says of each line of theirs whether it works as written, or what is different and why. Each row is proven by the test that it names; the tests write the
page.
"""


@dataclass(frozen=True)
class Line:
    """A line of a seed, what became of it, and the test that shows it."""

    seed: int
    line: str
    how: str
    test: str


LINES: list[Line] = []
Test = TypeVar("Test", bound=Callable[..., object])


def proves(seed: int, line: str, how: str = AS_WRITTEN) -> Callable[[Test], Test]:
    """The decorated test shows that a line of a seed holds, as written or as `how` says."""

    def note(test: Test) -> Test:
        file = Path(test.__code__.co_filename).name
        LINES.append(Line(seed, line, how, f"{file}::{test.__name__}"))
        return test

    return note


def page() -> str:
    """docs/seeds.md, of the lines that the tests have named."""
    parts = [_HEAD]
    for seed, title in SEEDS.items():
        parts += [f"## Seed {seed}: {title}", ""]
        parts += ["| the seed says | here | shown by |", "| --- | --- | --- |"]
        rows = [line for line in _in_order() if line.seed == seed]
        parts += [f"| {_cell(row.line)} | {_cell(row.how)} | `{row.test}` |" for row in rows]
        parts.append("")
    return "\n".join(parts)


def _in_order() -> list[Line]:
    """The lines as they stand in the tests: of one test, the decorator next to it came first."""
    by_test: dict[str, list[Line]] = {}
    for line in LINES:
        by_test.setdefault(line.test, []).insert(0, line)
    return [line for lines in by_test.values() for line in lines]


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def collect() -> None:
    """Import every test of this folder, which names its lines."""
    LINES.clear()
    for file in sorted(HERE.glob("test_*.py")):
        name = f"examples.{file.stem}"
        sys.modules.pop(name, None)
        importlib.import_module(name)


if __name__ == "__main__":
    sys.path[0] = str(HERE.parent)
    from examples import seed_lines  # the instance that the tests know

    seed_lines.collect()
    PAGE.write_text(seed_lines.page())
