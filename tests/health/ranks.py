"""Trains on several ranks with one planted fault after the other; rank 0 prints what was found.

Called by torchrun as: ranks.py ddp|fsdp
"""

import json
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import gradsight

STEPS, FROM = 36, 20
FAULTS = {
    "ddp": ["healthy", "scaled", "nan", "accumulated", "layer"],
    "fsdp": ["healthy", "scaled", "nan"],
}
FAULTS["fsdp"] += ["vanishing", "missing", "still"]


def net(activation: type[nn.Module] = nn.ReLU, depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(32, 32), activation())]
    return nn.Sequential(nn.Linear(20, 32), activation(), *hidden, nn.Linear(32, 5))


def parallel(kind: str, fault: str) -> Any:
    model = net(nn.Sigmoid, 6) if fault == "vanishing" else net()
    if fault == "layer" and dist.get_rank() == 1:
        model[2].weight.register_hook(lambda gradient: gradient * 50)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def groups(model: nn.Module, fault: str) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    first = {"missing": [], "still": [{"params": parameters[:2], "lr": 0.0}]}
    return [*first.get(fault, [{"params": parameters[:2]}]), {"params": parameters[2:]}]


def loss_of(model: nn.Module, fault: str, step: int) -> torch.Tensor:
    x = torch.randn(16, 20)
    loss = F.cross_entropy(model(x), x[:, :5].argmax(1))
    if dist.get_rank() == 1 and step >= FROM:
        loss = loss * {"scaled": 50.0, "nan": float("nan")}.get(fault, 1.0)
    return loss


def train(kind: str, fault: str) -> Any:
    model = parallel(kind, fault)
    torch.manual_seed(1 + dist.get_rank())
    optimizer = torch.optim.AdamW(groups(model, fault), lr=2e-3)
    with gradsight.watch(model, optimizer) as watched:
        for step in range(STEPS):
            model.zero_grad()
            rounds = (False, True) if fault == "accumulated" else (True,)
            for last in rounds:
                with nullcontext() if last or kind == "fsdp" else model.no_sync():
                    (loss_of(model, fault, step) / len(rounds)).backward()
            optimizer.step()
    return watched.report()


def told(report: Any) -> dict[str, Any]:
    return {finding["code"]: finding for finding in report.to_dict()["findings"]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    reports = {fault: train(sys.argv[1], fault) for fault in FAULTS[sys.argv[1]]}
    if dist.get_rank() == 0:
        result: dict[str, Any] = {fault: told(report) for fault, report in reports.items()}
        result["abstained"] = next(
            (each.reason for each in reports["healthy"].abstained if each.code == "GS503"), ""
        )
        print("RESULT", json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
