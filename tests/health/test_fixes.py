"""The code that findings offer: it runs as it is, on the names that it says it takes as given."""

import ast
import builtins
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import gradsight
from gradsight.health.fixes import GIVEN
from gradsight.health.judge import checks_at_work
from gradsight.values.findings import Finding

ADVICE = {each.check.code: each.check.advice for each in checks_at_work(True)}
FIXES = {code: advice.fix for code, advice in ADVICE.items()}
FIXES |= {
    f"{code} clipped": advice.if_clipped.fix
    for code, advice in ADVICE.items()
    if advice.if_clipped is not None
}


def given() -> dict[str, Any]:
    """What a script has: the names of `GIVEN`, and nothing else."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    data = torch.utils.data.TensorDataset(torch.rand(8, 4), torch.randint(3, (8,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    inputs, targets = next(iter(loader))
    loss_fn = nn.CrossEntropyLoss()
    return {
        "torch": torch,
        "nn": nn,
        "F": functional,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": loader,
        "inputs": inputs,
        "targets": targets,
        "loss_fn": loss_fn,
        "loss": loss_fn(model(inputs), targets),
    }


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Some fixes are for several ranks: here there is one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_names_are_those_that_are_documented() -> None:
    assert set(given()) == set(GIVEN)


@pytest.mark.parametrize("code", sorted(FIXES))
def test_every_fix_runs(code: str, one_rank: None, tmp_path: Path) -> None:
    names = given()
    names["loss"].backward(retain_graph=True)  # gradients are in place, and can be made again
    before = Path.cwd()
    os.chdir(tmp_path)  # batches may be kept
    try:
        exec(compile(FIXES[code], code, "exec"), names)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("code", sorted(FIXES))
def test_no_fix_uses_a_name_that_is_not_given(code: str) -> None:
    """Running it does not reach every branch; every name it reads is looked up here."""
    tree = ast.parse(FIXES[code])
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    made |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    made |= {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    known = made | set(GIVEN) | set(dir(builtins))
    assert {node.id for node in names} <= known


def spike(clipped: bool) -> Finding:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    torch.manual_seed(0)
    with gradsight.watch(model, optimizer, quiet=True) as watched:
        for step in range(60):
            weight = 1000.0 if step == 50 else 1.0
            (model(torch.rand(8, 4)).mean() * weight).backward()
            if clipped:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
        (found,) = (each for each in watched.report().findings if each.code == "GS201")
    return found


def test_a_run_that_clips_is_not_told_to_clip() -> None:
    loose, clipped = spike(clipped=False), spike(clipped=True)
    assert "and clip" in loose.recommendation
    assert "max_norm=1.0" in loose.fix
    assert clipped.recommendation.startswith("Clipping has kept the step short")
    assert "max_norm" not in clipped.fix
    assert "suspicious-" in clipped.fix
