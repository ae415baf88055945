"""DDP and FSDP2 on two ranks; rank 0 prints what became of every instrument.

Called by torchrun as: ranks.py FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsight
from matrix.instruments import outcomes
from matrix.nets import ROWS, VALIDATION, Batch, rows_of_step
from matrix.settings import Loop


class OfTwoRanks(Loop):
    """Each rank has half of the rows, and half of the validation's."""

    def rows(self, step: int, part: int) -> Batch:
        return half(rows_of_step(step))

    def engine(self, model: Any, optimizer: Any, run_dir: Path) -> gradsight.GhostEngine:
        return gradsight.GhostEngine(
            model, self.loss, half(VALIDATION), optimizer=optimizer, run_dir=run_dir
        )


def half(batch: Batch) -> Batch:
    count = len(batch[0]) // 2
    rows = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
    return batch[0][rows], batch[1][rows]


class Replicated(OfTwoRanks):
    def wrapped(self, net: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        return DistributedDataParallel(net), optimizer


class Sharded(OfTwoRanks):
    def wrapped(self, net: Any, optimizer: Any) -> tuple[Any, Any]:
        mesh = init_device_mesh("cpu", (2,))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        # An optimizer of the parameters that there are now.
        return net, torch.optim.SGD(net.parameters(), lr=0.1)


SETTINGS = {"DDP": Replicated(), "FSDP2": Sharded()}

if __name__ == "__main__":
    assert ROWS % 2 == 0
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, setting in SETTINGS.items():
        found = outcomes(setting, Path(sys.argv[1]) / name)
        if dist.get_rank() == 0:
            print(json.dumps({name: found}), flush=True)
    dist.destroy_process_group()
