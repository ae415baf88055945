"""docs/matrix.md: its tables, compared with what the tests have seen, or written by them.

MATRIX=write has the tests write the page (`make matrix`); otherwise they compare.
"""

import os
from pathlib import Path

from matrix.instruments import EXACT, INSTRUMENTS

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"
ROWS = (
    "plain",
    "accumulation",
    "bf16",
    "GradScaler",
    "compile",
    "activation checkpointing",
    "LoRA",
    "DDP",
    "FSDP2",
    "HF",
    "TRL SFT",
    "Lightning",
    "Fabric",
    "Accelerate",
)
MESHES = ("tensor", "sequence", "tensor and sharded", "experts", "context", "pipeline")
_BEGIN = "<!-- written by make matrix -->"
_END = "<!-- to here -->"

Cells = dict[tuple[str, str], str]
"""What became of a row's instrument, in full."""


def compare(row: str, found: dict[str, str]) -> None:
    """An assertion, unless the page says of this row what was found."""
    told = {(row, instrument): found[instrument] for instrument in INSTRUMENTS}
    page = PAGE.read_text()
    cells = cells_of(page)
    if os.environ.get("MATRIX") == "write":
        PAGE.write_text(with_cells(page, cells | told))
        return
    for key, said in told.items():
        assert cells.get(key) == said, f"docs/matrix.md says otherwise (make matrix): {key}"


def cells_of(page: str) -> Cells:
    """All cells of the tables; what is not exact stands in full in the last of them."""
    cells = {}
    for line in page.splitlines():
        columns = [column.strip() for column in line.strip("|").split(" | ")]
        if columns[0] not in (*ROWS, *MESHES):
            continue
        if len(columns) == 1 + len(INSTRUMENTS):
            cells |= {(columns[0], name): columns[1 + i] for i, name in enumerate(INSTRUMENTS)}
        if len(columns) == 3:
            kind = cells[columns[0], columns[1]]
            cells[columns[0], columns[1]] = f"{kind}: {columns[2]}"
    return cells


def with_cells(page: str, cells: Cells) -> str:
    """The page with these cells in its tables."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    tables = [_table("", ROWS, cells), _table("mesh", MESHES, cells), _reasons(cells)]
    return f"{before}{_BEGIN}\n{chr(10).join(tables)}{_END}{after}"


def _table(title: str, rows: tuple[str, ...], cells: Cells) -> str:
    lines = [_line([title, *INSTRUMENTS]), _line(["---"] * (1 + len(INSTRUMENTS)))]
    for row in rows:
        kinds = [cells.get((row, name), "").partition(":")[0] for name in INSTRUMENTS]
        lines.append(_line([row, *kinds]))
    return "".join(lines)


def _reasons(cells: Cells) -> str:
    lines = [_line(["", "instrument", "what it says"]), _line(["---"] * 3)]
    for row in (*ROWS, *MESHES):
        for name in INSTRUMENTS:
            _, _, reason = cells.get((row, name), EXACT).partition(": ")
            if reason:
                lines.append(_line([row, name, reason]))
    return "".join(lines)


def _line(columns: list[str]) -> str:
    return f"| {' | '.join(columns)} |\n"
