"""The scores that wait to be written, and how they are written: a parquet file every so many steps,
complete or not at all.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsight.core import rundir
from gradsight.core.files import whole_file
from gradsight.core.sharing import Ranks
from gradsight.errors import GradsightError, GradsightWarning


@dataclass
class Entry:
    """The scores of one block: a table [targets, B], or [targets, parameters, B] with
    per_parameter.
    """

    step: int
    sample_ids: list[int | str]
    domains: list[str | None]
    table: Tensor
    direction: str
    lr: float | None = None
    clip_coef: Tensor | None = None
    """Filled in when the optimizer has stepped."""


def to_host(table: Tensor) -> Tensor:
    """A copy in main memory that the device fills when it gets there."""
    return (
        table.detach().to("cpu", non_blocking=True)
        if table.device.type == "cuda"
        else table.detach().clone()
    )


@dataclass
class Ledger:
    """Scores by step, until they are saved or dropped."""

    targets: tuple[str, ...]
    parameters: tuple[str, ...] | None
    """With per_parameter: the names in the order of the lists."""
    trainable: frozenset[str]
    precondition: str | None
    entries: list[Entry] = field(default_factory=list)

    def take(self, before: int | None) -> list[dict[str, Any]]:
        """Remove and return the rows of all steps before the given one; None: of all steps."""
        due = [e for e in self.entries if before is None or e.step < before]
        self.entries = [e for e in self.entries if before is not None and e.step >= before]
        if any(e.table.is_pinned() for e in due):
            torch.cuda.synchronize()
        return [row for entry in due for row in self._rows(entry)]

    def drop(self, before: int) -> None:
        """Forget the steps before the given one."""
        self.entries = [e for e in self.entries if e.step >= before]

    def _rows(self, entry: Entry) -> list[dict[str, Any]]:
        coef = None if entry.clip_coef is None else float(entry.clip_coef)
        rows = []
        for k, target in enumerate(self.targets):
            values = entry.table[k]
            totals = (values if self.parameters is None else values.sum(0)).tolist()
            lists = None if self.parameters is None else values.t().tolist()
            for i, sample_id in enumerate(entry.sample_ids):
                row = {
                    "step": entry.step,
                    "sample_id": sample_id,
                    "domain": entry.domains[i],
                    "target": target,
                    "score": totals[i],
                    "lr": entry.lr,
                    "clip_coef": None if coef is None or coef != coef else coef,
                }
                if lists is not None:
                    row["by_parameter"] = self._in_order(lists[i])
                if self.precondition is not None:
                    row["direction"] = entry.direction
                rows.append(row)
        return rows

    def _in_order(self, values: Sequence[float]) -> list[float | None]:
        """One entry per parameter of the model; frozen ones have none."""
        assert self.parameters is not None
        given = iter(values)
        return [next(given) if name in self.trainable else None for name in self.parameters]


def write(
    directory: Path, iteration: int, rows: list[dict[str, Any]], ledger: Ledger, ranks: Ranks
) -> Path | None:
    """One file with every process's rows, written by the first; returns its path there."""
    gathered = ranks.gather_objects(rows)
    if gathered is None:
        return None
    path = directory / rundir.score_file(iteration)
    merged = [row for part in gathered for row in part]
    if merged:
        write_parquet(path, merged, ledger)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], ledger: Ledger) -> None:
    """Write to a temporary file, force it to disk, and rename it."""
    import pyarrow
    import pyarrow.parquet

    if path.exists():
        steps = {row["step"] for row in rows}
        rows = [row for row in _rows_in(path) if row["step"] not in steps] + rows
    if not all(isinstance(row["sample_id"], int) for row in rows):
        rows = [{**row, "sample_id": str(row["sample_id"])} for row in rows]
    fields = [
        ("step", pyarrow.int64()),
        (
            "sample_id",
            pyarrow.int64() if isinstance(rows[0]["sample_id"], int) else pyarrow.string(),
        ),
        ("domain", pyarrow.string()),
        ("target", pyarrow.string()),
        ("score", pyarrow.float64()),
        ("lr", pyarrow.float64()),
        ("clip_coef", pyarrow.float64()),
    ]
    if ledger.parameters is not None:
        fields.append(("by_parameter", pyarrow.list_(pyarrow.float64())))
    if ledger.precondition is not None:
        fields.append(("direction", pyarrow.string()))
    names = (
        {} if ledger.parameters is None else {"gradsight.parameters": json.dumps(ledger.parameters)}
    )
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(fields, metadata=names))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with whole_file(path, path.with_suffix(".partial")) as partial:
            pyarrow.parquet.write_table(table, partial)
    except OSError as error:
        raise GradsightError(f"the scores could not be written to {path}: {error}") from error


def _rows_in(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier file of this name; one that cannot be read is put aside."""
    import pyarrow.parquet

    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        warnings.warn(
            f"{path} cannot be read ({error}); it is now {aside.name}",
            GradsightWarning,
            stacklevel=2,
        )
        return []
    return rows
