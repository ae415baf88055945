"""Planted faults of one rank, and healthy runs, on real processes: two gloo ranks under
DistributedDataParallel.

faults.py calls this file through torchrun; rank 0 prints one line of JSON per run.
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import zoo
from torch import Tensor, nn

RIGHT = {"rank-local corruption": ["GS503"], "NaN on one rank": ["GS503"], "two ranks": []}
KINDS = {
    "rank-local corruption": "mlp cnn rnn gpt",
    "NaN on one rank": "mlp cnn rnn gpt",
    "two ranks": "mlp cnn rnn gpt",
}
BROKEN, FROM = 1, 60


def launch(seeds: int, only: str) -> Iterator[dict[str, Any]]:
    """Every run whose name contains `only`: its name, kind, codes and first steps of the findings,
    losses.
    """
    names = [name for name in RIGHT if only in name]
    if not names:
        return
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc_per_node=2",
    ]
    done = subprocess.run(
        [*command, __file__, str(seeds), *names], stdout=subprocess.PIPE, text=True, check=True
    )
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def plan(name: str, kind: str, seed: int) -> zoo.Plan:
    """Each rank draws its own data; the broken one spoils what it brings from some step on."""
    mine = name != "two ranks" and dist.get_rank() == BROKEN
    steps = [0]

    def spoil(gradient: Tensor) -> Tensor:
        if not mine or steps[0] < FROM:
            return gradient
        if name == "NaN on one rank":
            return gradient * float("nan")
        return gradient + 20 * gradient.std() * torch.randn_like(gradient)

    def model() -> nn.Module:
        inner = zoo.MODELS[kind]()
        for parameter in inner.parameters():
            parameter.register_hook(spoil)
        return nn.parallel.DistributedDataParallel(inner)

    def batches(plan: zoo.Plan, generator: torch.Generator) -> Iterator[zoo.Batch]:
        own = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        for step in range(plan.steps):
            steps[0] = step
            yield zoo.data(kind, plan.batch, own)

    return zoo.Plan(kind, seed, model=model, batches=batches, steps=100)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        for kind in KINDS[name].split():
            for seed in range(int(sys.argv[1])):
                one = plan(name, kind, seed)
                report = one.run()
                if dist.get_rank() == 0:
                    findings = [
                        (each.code, each.first_step, each.evidence) for each in report.findings
                    ]
                    print(
                        json.dumps(
                            {"name": name, "kind": kind, "findings": findings, "losses": one.losses}
                        ),
                        flush=True,
                    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
