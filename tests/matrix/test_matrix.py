"""Every instrument in every way of training: exact, or refused as docs/matrix.md says."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from launch import run_ranks
from matrix import page
from matrix.instruments import EXACT, INSTRUMENTS, NOT_APPLICABLE, REFUSED, Trial, outcomes
from matrix.libraries import LIBRARIES
from matrix.settings import LOOPS, Loop
from matrix.trainers import TRAINERS

IN_ONE_PROCESS: dict[str, Any] = {**LOOPS, **LIBRARIES, **TRAINERS}
SLOW = ("TRL SFT", "compile", "Fabric")
ON_TWO_RANKS = ("DDP", "FSDP2")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.slow if row in SLOW else ()) for row in IN_ONE_PROCESS],
)
def test_one_process(row: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the trainers, and torch's in their name
        found = outcomes(IN_ONE_PROCESS[row], tmp_path)
    page.compare(row, found)


def test_two_ranks(tmp_path: Path) -> None:
    said = run_ranks(Path(__file__).with_name("ranks.py"), tmp_path)
    assert compare_all(said) == set(ON_TWO_RANKS)


def compare_all(said: str) -> set[str]:
    """Compare what ranks have told line by line; the rows that they told of."""
    rows = set()
    for line in said.splitlines():
        if line.startswith("{"):
            for row, found in json.loads(line).items():
                page.compare(row, found)
                rows.add(row)
    return rows


def test_no_cell_is_empty() -> None:
    cells = page.cells_of(page.PAGE.read_text())
    rows = (*page.ROWS, *page.MESHES)
    assert set(cells) == {(row, name) for row in rows for name in INSTRUMENTS}
    for (row, name), said in cells.items():
        kind, _, reason = said.partition(": ")
        assert kind in (EXACT, REFUSED, NOT_APPLICABLE), (row, name)
        assert bool(reason) == (kind != EXACT), (row, name)
    assert {*IN_ONE_PROCESS, *ON_TWO_RANKS} == set(page.ROWS)


def test_what_every_way_of_training_has() -> None:
    cells = page.cells_of(page.PAGE.read_text())
    for row in page.ROWS:
        for name in ("distribution", "health", "dump"):
            assert cells[row, name] == EXACT, (row, name)


class Wrong(Loop):
    """Its truth is another step's."""

    def gradients(self) -> Any:
        return {name: 1.001 * gradient for name, gradient in super().gradients().items()}

    def scores(self) -> Any:
        return 1.001 * super().scores()

    def uncheckpointed(self) -> Any:
        return Shifted()


class Shifted(Loop):
    def loss(self, model: Any, batch: Any) -> Any:
        return super().loss(model, (batch[0], batch[1].flip(0)))


@pytest.mark.parametrize("instrument", [name for name in INSTRUMENTS if name != "health"])
def test_a_wrong_number_is_seen(instrument: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        getattr(Trial(Wrong(), tmp_path), instrument)()


def test_a_page_that_says_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MATRIX", raising=False)
    with pytest.raises(AssertionError, match=r"docs/matrix\.md says otherwise"):
        page.compare("plain", dict.fromkeys(INSTRUMENTS, "refused: by nobody"))
