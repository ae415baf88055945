"""Incidents: step, code, operation, source line, module and samples of each diagnosis."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gradsight
from golden import bad_runs
from golden.results import Group


def train(name: str) -> dict[str, Any]:
    """Train with one bad step and return what was recorded about it."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    middle, loss_of, changed = bad_runs.RUNS[name]
    model = bad_runs.body(middle())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as run_dir:
        with gradsight.watch(model, optimizer, run_dir=run_dir, quiet=True) as watched:
            for step in range(bad_runs.STEPS):
                x = bad_runs.rows(step)
                for row, value in changed.items():
                    if step == bad_runs.BAD_STEP:
                        x[row] = value
                watched.ids([f"{step}-{row}" for row in range(len(x))])
                loss_of(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
        run = gradsight.open_run(run_dir)
        return {
            "incidents": [_incident(each) for each in run.incidents()],
            "findings": [[each.code, each.severity, each.first_step] for each in run.findings()],
        }


def _incident(incident: Any) -> dict[str, Any]:
    diagnosis = incident.diagnosis
    return {
        "step": incident.step,
        "code": incident.code,
        "folder": Path(incident.path).name,
        "operation": diagnosis and _operation(diagnosis.operation),
        "samples": diagnosis and [[each.sample_id, each.row] for each in diagnosis.samples],
        "shares": diagnosis and [each.share for each in diagnosis.samples],
    }


def _operation(operation: Any) -> Any:
    if operation is None:
        return None
    place = operation.place and Path(operation.place).name
    fields = ("operation", "phase", "module", "source")
    return {"place": place} | {field: getattr(operation, field) for field in fields}


GROUP = Group(
    "incidents",
    {name: partial(train, name) for name in bad_runs.RUNS},
    tolerance=1e-6,  # shares of samples, in float64
)
