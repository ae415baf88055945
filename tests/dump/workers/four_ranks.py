"""Four gloo ranks as a mesh of two by two: sharded over two and replicated over two, and cut in
both directions.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gradsight import GradientDumper


def main(run: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    torch.manual_seed(1 + dist.get_rank())
    model(torch.randn(4, 5)).square().mean().backward()
    for name, placements in {
        "both": [Shard(1), Shard(0)],
        "columns": [Replicate(), Shard(1)],
    }.items():
        model.register_parameter(
            name, nn.Parameter(distribute_tensor(torch.randn(5, 7), mesh, placements))
        )
        model.get_parameter(name).grad = distribute_tensor(
            torch.arange(35.0).view(5, 7), mesh, placements
        )
    with GradientDumper(run) as full, GradientDumper(run, save_first_n=5) as sampled:
        full.dump(model, 0)
        sampled.dump(model, 0)
    truth = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(truth, run / "truth.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
