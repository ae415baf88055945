"""Faults on one of two ranks, and healthy runs: DistributedDataParallel over gloo.

`launch` starts this file on two ranks. Rank 0 prints one line of JSON per run.
"""

import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launch import run_ranks
from zoo import findings_of, plans

RIGHT = {"rank-local corruption": ["GS503"], "NaN on one rank": ["GS503"], "two ranks": []}
KINDS = tuple(plans.MODELS)
BROKEN, FROM = 1, 60
Run = tuple[str, str, int]
"""Name, kind of model, seed."""


def all_runs(seeds: int) -> Iterator[Run]:
    """Yield every case with every seed."""
    for name in RIGHT:
        for kind in KINDS:
            for seed in range(seeds):
                yield name, kind, seed


def launch(runs: Iterable[Run], dtype: str = "float32") -> list[dict[str, Any]]:
    """Train on two ranks and return each run's name, kind, findings and losses."""
    wanted = list(runs)
    if not wanted:
        return []
    printed = run_ranks(Path(__file__), dtype, json.dumps(wanted), timeout=60 * (1 + len(wanted)))
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def plan(name: str, kind: str, seed: int) -> plans.Plan:
    """Each rank draws its own data; the faulty one corrupts its gradients from a given step on."""
    mine = name != "two ranks" and dist.get_rank() == BROKEN
    steps = [0]

    def spoil(gradient: Tensor) -> Tensor:
        if not mine or steps[0] < FROM:
            return gradient
        if name == "NaN on one rank":
            return gradient * float("nan")
        return gradient + 20 * gradient.std() * torch.randn_like(gradient)

    def model() -> nn.Module:
        inner = plans.MODELS[kind]()
        for parameter in inner.parameters():
            parameter.register_hook(spoil)
        return nn.parallel.DistributedDataParallel(inner)

    def batches(plan: plans.Plan, generator: torch.Generator) -> Iterator[plans.Batch]:
        own = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        for step in range(plan.steps):
            steps[0] = step
            yield plans.data(kind, plan.batch, own)

    return plans.Plan(kind, seed, model=model, batches=batches, steps=100)


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, sys.argv[1]))
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for name, kind, seed in json.loads(sys.argv[2]):
        one = plan(name, kind, seed)
        findings = findings_of([one.run()])
        if dist.get_rank() == 0:
            result = {"name": name, "kind": kind, "findings": findings, "losses": one.losses}
            print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
