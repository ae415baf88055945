"""Trains on two ranks, one of which holds a bad sample. Called by torchrun as: ranks.py RUNS_DIR
KIND...
"""

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsight
from incidents.faults import mlp, state

BAD_STEP, STEPS, ROWS = 3, 5, 4


def train(kind: str, run_dir: Path | None) -> tuple[list[bytes], list[dict[str, object]]]:
    model: Any = fully_shard(mlp()) if kind == "sharded" else DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inner: nn.Module = model if kind == "sharded" else model.module
    watched: nn.Module = model if kind != "inner" else inner
    history = []
    recorder = "batch" if run_dir is not None else False
    with gradsight.watch(watched, optimizer, run_dir=run_dir, recorder=recorder) as watch:  # type: ignore[arg-type]
        for step in range(STEPS):
            micro_batches = 3 if kind == "accumulating" else 1
            for number in range(micro_batches):
                x = torch.randn(
                    ROWS,
                    4,
                    generator=torch.Generator().manual_seed(
                        100 * step + 10 * dist.get_rank() + number
                    ),
                )
                if step == BAD_STEP and dist.get_rank() == 1 and number == micro_batches // 2:
                    x[2, 1] = math.nan
                waiting = (
                    model.no_sync() if number < micro_batches - 1 else contextlib.nullcontext()
                )
                with waiting:
                    (model(x).square().mean() / micro_batches).backward()
                history.append(state(inner, optimizer) if kind != "sharded" else b"")
            optimizer.step()
            optimizer.zero_grad()
        report = watch.report() if dist.get_rank() == 0 and run_dir is not None else None
    findings = (
        [finding for finding in report.to_dict()["findings"] if finding["code"] == "GS103"]
        if report
        else []
    )
    return history, findings


def main() -> None:
    dist.init_process_group("gloo")
    told = {}
    for kind in sys.argv[2:]:
        plain, _ = train(kind, None)
        history, findings = train(kind, Path(sys.argv[1]) / kind)
        same = torch.tensor([float(history == plain)])
        dist.all_reduce(same, op=dist.ReduceOp.MIN)
        told[kind] = {"same": bool(same), "findings": findings}
    if dist.get_rank() == 0:
        print(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
