"""Runs with scores that a test can know by heart."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

Row = dict[str, Any]


def row(
    step: int, sample_id: int | str, score: float, domain: str | None = "code", target: str = "val"
) -> Row:
    return {
        "step": step,
        "sample_id": sample_id,
        "domain": domain,
        "target": target,
        "score": score,
        "lr": 0.1,
        "clip_coef": 1.0,
    }


def write(run_dir: Path, iteration: int, rows: list[Row]) -> Path:
    """One file of scores, as the ghost engine names them."""
    file = run_dir / "grad_dotprods" / f"iter_{iteration:06d}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def ordinary(run_dir: Path, steps: int = 20, targets: tuple[str, ...] = ("val",)) -> Path:
    """Ten samples in every step, raw scores that shrink: sample 0 of domain "noise" hurts, 9 of
    domain "prose" helps most.
    """
    for start in range(0, steps, 10):
        rows = [
            row(
                step,
                sample,
                (sample - 1.5) / (step + 1),
                "noise" if sample < 2 else "code" if sample < 6 else "prose",
                target,
            )
            for step in range(start, start + 10)
            for target in targets
            for sample in range(10)
        ]
        write(run_dir, start + 10, rows)
    return run_dir
