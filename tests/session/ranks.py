"""Trains a model on several ranks, with and without a watch; rank 0 compares with one process in
float64.

Called by torchrun as: ranks.py ddp|fsdp|hsdp RUN_DIR
"""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsight

STEPS, MICRO_BATCHES, ROWS = 20, 3, 4


class Net(nn.Module):
    """Sizes that do not divide by the number of ranks, a scalar, and a layer with fewer rows than
    ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()) * self.scale


def data() -> list[list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """By step, micro-batch and rank; the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    ranks = dist.get_world_size()
    return [
        [[(torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 1, generator=generator)) for _ in range(ranks)]
         for _ in range(MICRO_BATCHES)]
        for _ in range(STEPS)
    ]  # fmt: skip


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def parallel(kind: str) -> nn.Module:
    model = Net()
    if kind == "ddp":
        return DistributedDataParallel(model)
    ranks = dist.get_world_size()
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (ranks,))
    else:
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(kind: str, run_dir: str | None) -> list[torch.Tensor]:
    """Accumulate without communication, then step. Returns this rank's part of the weights."""
    model = parallel(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every = gradsight.Schedule(step_interval=2)
    watched = (
        gradsight.watch(model, optimizer, run_dir=run_dir, histograms=every) if run_dir else None
    )
    for micro_batches in data():
        for number, by_rank in enumerate(micro_batches):
            last = number == MICRO_BATCHES - 1
            if kind == "ddp":
                model.require_backward_grad_sync = last
            else:
                model.set_requires_gradient_sync(last)
            (loss_of(model, by_rank[dist.get_rank()]) / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    if watched is not None:
        watched.close()
    return [
        getattr(parameter, "_local_tensor", parameter).detach().clone()
        for parameter in model.parameters()
    ]


def expected() -> list[dict[str, list[float]]]:
    """Norm and largest entry of every gradient, by one process in float64 that clips as the ranks
    do.
    """
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for micro_batches in data():
        for by_rank in micro_batches:
            for x, y in by_rank:
                (
                    loss_of(model, (x.double(), y.double()))
                    / (MICRO_BATCHES * dist.get_world_size())
                ).backward()
        steps.append(
            {
                name: [float(p.grad.norm()), float(p.grad.abs().max()), p.numel()]
                for name, p in model.named_parameters()
            }
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return steps


def no_sync_at_the_end(run_dir: str) -> None:
    """A mistake: the last micro-batch is not reduced either."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer, run_dir=run_dir), model.no_sync():
        loss_of(model, data()[0][0][dist.get_rank()]).backward()
        optimizer.step()


def nan_on_all(run_dir: str) -> None:
    """The second step's gradient is NaN; what is said of it goes to standard output."""
    sys.stderr = sys.stdout
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer, run_dir=run_dir):
        for step in range(3):
            x, y = data()[step][0][dist.get_rank()]
            loss_of(model, (x / (step != 1), y)).backward()
            optimizer.step()
            optimizer.zero_grad()


def one_look(kind: str) -> dict[str, float]:
    model = parallel(kind)
    by_rank = data()[0][0]
    loss_of(model, by_rank[dist.get_rank()]).backward()
    with gradsight.MetricsTracker() as tracker:
        return gradsight.log_gradient_distribution(model, tracker, 0, log_histogram=True)


class Experts(nn.Module):
    """Three experts in a tensor, so that two ranks hold two and one; the last gets no token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(5, 3)
        self.experts = nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1) * torch.tensor([1.0, 0.5, 0.0])
        return torch.einsum("nd,edh,ne->nh", x, self.experts, weights).clone()


def experts(run_dir: str) -> list[float]:
    """Two steps under FSDP2; the exact norm of each expert's gradient at the first."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    twin = Experts()
    twin(x).square().mean().backward()
    dist.all_reduce(twin.experts.grad, op=dist.ReduceOp.AVG)
    model = fully_shard(Experts())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer, run_dir=run_dir):
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [float(gradient.norm()) for gradient in twin.experts.grad.double()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kind, run_dir = sys.argv[1], sys.argv[2]
    if kind == "no_sync":
        no_sync_at_the_end(run_dir)
    elif kind == "nan":
        nan_on_all(run_dir)
    elif kind == "experts":
        exact = experts(run_dir)
        if dist.get_rank() == 0:
            print("RESULT", json.dumps(exact))
    elif kind == "one_look":
        norms = [one_look("fsdp"), one_look("ddp")]
        if dist.get_rank() == 0:
            print("RESULT", json.dumps(norms))
    else:
        watched, alone = train(kind, run_dir), train(kind, None)
        assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True)), (
            "training was changed"
        )
        twin = copy.deepcopy(expected())
        if dist.get_rank() == 0:
            Path(run_dir, "expected.json").write_text(json.dumps(twin))
    dist.barrier()
    dist.destroy_process_group()
