"""docs/supported.md: every row names tests, and every test that it names exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
NODE_ID = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)(?:\[([^`]+)\])?`")


def rows(text: str) -> list[tuple[str, str]]:
    """Return the situation and the tests of each row of each table."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [(row[0], row[-1]) for row in cells if row[0] != "situation" and set(row[0]) != {"-"}]


SUPPORTED = rows((TREE / "docs/supported.md").read_text())


@cache
def functions(file: Path) -> set[str]:
    return {
        each.name for each in ast.parse(file.read_text()).body if isinstance(each, ast.FunctionDef)
    }


@cache
def words(folder: Path) -> set[str]:
    """Return the names of functions and the strings of a folder's files: cases are called so."""
    trees = [ast.walk(ast.parse(file.read_text())) for file in folder.glob("*.py")]
    nodes = [node for tree in trees for node in tree]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return names | {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def missing(tests: str) -> list[str]:
    """Return what the last cell of a row names and the tests do not have."""
    named = NODE_ID.findall(tests)
    if not named or NODE_ID.sub("", tests).strip(", "):
        return [f"no node id in: {tests}"]
    absent = []
    for file, function, case in named:
        path = TREE / file
        if not path.exists() or function not in functions(path):
            absent.append(f"{file}::{function}")
        elif case and case not in words(path.parent):
            # A case of several parameters is called by all of them: ddp-2.
            name, *numbers = case.split("-")
            if name not in words(path.parent) or not all(map(str.isdigit, numbers)):
                absent.append(f"{file}::{function}[{case}]")
    return absent


@pytest.mark.parametrize(("situation", "tests"), SUPPORTED, ids=[row[0] for row in SUPPORTED])
def test_every_row_names_tests_that_exist(situation: str, tests: str) -> None:
    assert missing(tests) == []


def test_no_situation_is_listed_twice() -> None:
    situations = [situation for situation, _ in SUPPORTED]
    assert len(situations) == len(set(situations)) > 50


@pytest.mark.parametrize(
    "tests",
    [
        "",
        "all of them",
        "`tests/session/test_watch.py`",
        "`tests/session/test_none.py::test_a`",
        "`tests/session/test_watch.py::test_none`",
        "`tests/session/test_true_gradient.py::test_every_loop_is_seen_truly_and_left_alone[no_such_loop]`",
    ],
)
def test_a_test_that_does_not_exist_is_found(tests: str) -> None:
    assert missing(tests) != []
