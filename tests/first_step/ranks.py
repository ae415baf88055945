"""Two ranks: the module inside DDP is looked at by each; FSDP2 is left out, and said."""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import gradsight
from first_step.models import WORDS, Causal, tokens


def train(kind: str, masked: bool) -> Any:
    torch.manual_seed(0)
    model: nn.Module = Causal(masked=masked)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradsight.watch(model, optimizer, quiet=True) as watched:
        batch = tokens().roll(dist.get_rank(), dims=0)  # another one for every rank
        for _ in range(3):
            optimizer.zero_grad()
            out = model(batch[:, :-1])
            F.cross_entropy(out.reshape(-1, WORDS), batch[:, 1:].reshape(-1)).backward()
            optimizer.step()
        return watched.report()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    told = {}
    for masked in (False, True):
        report = train(sys.argv[1], masked)
        told[str(masked)] = {
            "codes": [finding.code for finding in report.findings],
            "abstained": {each.code: each.reason for each in report.abstained},
        }
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()
