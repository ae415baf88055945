"""Runs for the page, written straight into the record: every number is known to the test."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsight.show.page.assemble import page
from gradsight.show.page.payload import run_payload
from gradsight.show.summary import summarize
from gradsight.store import tail_format as frames
from gradsight.store.reader import open_run
from gradsight.store.run_files import write_config
from gradsight.store.store import open_store
from gradsight.values.findings import Finding
from gradsight.values.histograms import Histogram
from gradsight.values.steps import Step, block_of

NONE = -1.0
"""Stands for no gradient at a step."""


def parameter_names(blocks: int, per_block: int = 4) -> list[str]:
    parts = ("attn.weight", "attn.bias", "mlp.weight", "mlp.bias")[:per_block]
    inner = [f"h.{block}.{part}" for block in range(blocks) for part in parts]
    return ["wte.weight", *inner, "ln_f.weight"]


def plain_norms(steps: int, parameters: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """Norms with a level each, and a little noise."""
    random = np.random.default_rng(seed)
    level = random.normal(-4, 1.5, parameters)
    norms: npt.NDArray[np.float64] = np.exp2(level + random.normal(0, 0.3, (steps, parameters)))
    return norms


def finding(code: str, step: int, severity: str = "warning", **more: Any) -> Finding:
    fields: dict[str, Any] = {
        "name": "gradient spike",
        "parameters": ("h.0.attn.weight",),
        "evidence": f"step {step}: norm 16, up to 55 times the usual",
        "message": "The gradient jumped.",
        "recommendation": "Look at the batch.",
        "fix": "clip_grad_norm_(model.parameters(), 1.0)",
        **more,
    }
    return Finding(code, severity=severity, first_step=step, **fields)


@dataclass
class Recorded:
    """A run on disk, and what was put into it."""

    path: Path
    names: list[str]
    norms: npt.NDArray[np.float64]
    """As the record holds them: rounded to a float32."""
    first: int = 0
    interval: int = 1
    findings: Sequence[Finding] = field(default_factory=list)

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        return self.first + self.interval * np.arange(len(self.norms))

    def row(self, name: str) -> npt.NDArray[np.float64]:
        """The norms of a parameter or of a block, `NONE` where there is no gradient."""
        if name in self.names:
            column: npt.NDArray[np.float64] = self.norms[:, self.names.index(name)]
            return column
        members = self.norms[:, [block_of(each) == name for each in self.names]]
        there = members != NONE
        whole = np.sqrt((np.where(there, members, 0.0) ** 2).sum(axis=1))
        return np.where(there.any(axis=1), whole, NONE)

    def html(self, **more: Any) -> Path:
        """The page of the run, as a file that is made once."""
        run = open_run(self.path)
        target = self.path / "report.html"
        if target.exists() and not more:
            return target
        target.write_text(page(run_payload(run, summarize(run), **more)), encoding="utf-8")
        return target


def record(path: Path, norms: npt.NDArray[np.float64], **options: Any) -> Recorded:
    """Write a run of these norms, [steps, parameters].

    Options: names, findings, first, interval, losses, histograms (every so many steps), config.
    """
    names = options.get("names") or parameter_names((norms.shape[1] - 2) // 4)
    first, interval = options.get("first", 0), options.get("interval", 1)
    losses = options.get("losses")
    config = {"settings": {"watch": {}}, "parameters": [{"name": name} for name in names]}
    store = open_store(path)
    write_config(path, config | options.get("config", {}))
    for place, row in enumerate(norms):
        step = first + interval * place
        loss = 2.0 if losses is None else float(losses[place])
        store.add_step(*_step(step, row, names, loss))
        if options.get("histograms") and place % options["histograms"] == 0:
            store.add_histograms(step, [_histogram(step, name) for name in [*names, None]])
    for each in options.get("findings", ()):
        store.add_finding(each)
    store.close()
    kept = norms.astype(np.float32).astype(np.float64)
    return Recorded(path, names, kept, first, interval, options.get("findings", ()))


def _step(
    step: int, row: npt.NDArray[np.float64], names: list[str], loss: float
) -> tuple[Step, list[str], bytes]:
    there = np.flatnonzero(row != NONE)
    values = row[there]
    columns = {"l2": values, "max_abs": values / 2}
    if step % 50 == 0:
        columns["update_ratio"] = values / 1000
        columns["weight_rms"] = values * 10
        columns["update_rms"] = values / 100
    if not np.isfinite(values).all():
        columns["nan"] = np.isnan(values) * 1.0
        columns["inf"] = np.isinf(values) * 1.0
    rows = None if len(there) == len(names) else there.tolist()
    total = float(np.sqrt((values**2).sum()))
    made = Step(step, float(step), loss=loss, lr=0.1, total_norm=total)
    return made, names, frames.pack_statistics(rows, columns)


def _histogram(step: int, name: str | None) -> Histogram:
    """Entries over thirty powers of two, as real gradients have them."""
    random = np.random.default_rng([step, len(name or "")])
    tallies = random.poisson(4096 * np.exp(-(((np.arange(30) - 20) / 5) ** 2)))
    half = tuple((tallies / 2).tolist())
    size = int(tallies.sum()) + 64
    return Histogram(step, name, -30, half, half, 64.0, 0, 0, 0, size, size)
