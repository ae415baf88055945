"""Trains on four ranks under meshes of several kinds; rank 0 compares with one process in float64.

Called by torchrun as: meshes.py FOLDER
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import gradsight
from gradsight import GradientDumper, get_checkpoint_metadata, load_keys

WORDS, WIDTH, LENGTH, ROWS = 11, 8, 4, 8
LIMIT = 0.1
generator = torch.Generator().manual_seed(1)
X = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
Y = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)


class Gathered(torch.autograd.Function):
    """Every rank's tensor, in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total[dist.get_rank()]


def all_gather(mine: Tensor) -> tuple[Tensor, ...]:
    return Gathered.apply(mine.contiguous()).unbind()


class Experts(nn.Module):
    """Every token goes to every expert, weighed by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        if not isinstance(self.weight, DTensor):
            return torch.einsum("btd,edf,bte->btf", x, self.weight, shares)
        mine = self.weight.to_local()
        rank = dist.get_rank()
        first = rank * len(mine)
        # Every rank's tokens come to every rank's experts, and what they make of them goes back.
        tokens = torch.cat(all_gather(x))
        weighed = torch.cat(all_gather(shares))[..., first : first + len(mine)]
        made = torch.einsum("btd,edf,bte->btf", tokens, mine, weighed)
        return torch.stack(all_gather(made)).sum(0)[rank * len(x) : (rank + 1) * len(x)]


class Attention(nn.Module):
    """Causal; `divided`: every rank has its part of the positions, and gathers keys and values."""

    divided = False

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        first = 0
        if self.divided:
            first = dist.get_rank() * x.shape[1]
            key = torch.cat(all_gather(key), 1)
            value = torch.cat(all_gather(value), 1)
        places = torch.arange(first, first + x.shape[1])
        later = torch.arange(key.shape[1]) > places[:, None]
        weights = (query @ key.transpose(1, 2)).masked_fill(later, -torch.inf)
        return weights.softmax(-1) @ value


class Net(nn.Module):
    def __init__(self, between: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.between = between()
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        x = x + self.between(x)
        x = x + self.down(torch.tanh(self.up(x)))
        # A copy: FSDP2 warns of views as results.
        return self.head(self.norm(x)).clone()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


# How the model lies on the ranks; each returns the rows and positions of this rank.

Part = tuple[slice, slice]


def tensor_parallel(net: nn.Module) -> Part:
    mesh = init_device_mesh("cpu", (4,))
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return slice(None), slice(None)


def sequence_parallel(net: nn.Module) -> Part:
    """Norms have summands of their gradients on the ranks."""
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(net, init_device_mesh("cpu", (4,)), plan)
    return slice(None), slice(None)


def tensor_and_sharded(net: nn.Module) -> Part:
    """Some parameters lie on both axes, some on one, and are replicated on the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(net, mesh["tp"], plan)
    fully_shard(net, mesh=mesh["dp"])
    half = ROWS // 2
    first = mesh["dp"].get_local_rank() * half
    return slice(first, first + half), slice(None)


def experts_parallel(net: Any) -> Part:
    """Every rank has one expert; everything else is sharded."""
    mesh = init_device_mesh("cpu", (4,))
    experts = net.between
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.data, mesh, [Shard(0)]))
    # Its gradient is of all ranks' tokens, and theirs is the mean over ranks.
    experts.weight.register_hook(lambda gradient: gradient / 4)
    fully_shard(net, mesh=mesh, ignored_params={experts.weight})
    first = dist.get_rank() * ROWS // 4
    return slice(first, first + ROWS // 4), slice(None)


def context_parallel(net: Any) -> Part:
    """Every rank has its part of every sequence. torch's own has no kernel for the CPU."""
    net.between.divided = True
    fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
    first = dist.get_rank() * LENGTH // 4
    return slice(None), slice(first, first + LENGTH // 4)


KINDS: dict[str, tuple[type[nn.Module], Callable[[Any], Part]]] = {
    "tensor": (nn.Identity, tensor_parallel),
    "sequence": (nn.Identity, sequence_parallel),
    "tensor and sharded": (nn.Identity, tensor_and_sharded),
    "experts": (Experts, experts_parallel),
    "context": (Attention, context_parallel),
}


def train(net: nn.Module, part: Part, folder: Path) -> None:
    x, y = X[part], Y[part]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    dumper = GradientDumper(folder)
    with gradsight.watch(net, optimizer, run_dir=folder, dump=dumper):
        for _ in range(2):
            loss_of(net, x, y).backward()
            scale(net, LIMIT)
            optimizer.step()
            optimizer.zero_grad()


def scale(net: nn.Module, factor: float) -> None:
    """Clips by a known factor; torch's own clipping does not take several meshes."""
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def check(twin: nn.Module, folder: Path) -> None:
    """Both steps, and every number of the first."""
    loss_of(twin, X, Y).backward()
    gradients = {name: each.grad for name, each in twin.named_parameters() if each.grad is not None}
    run = gradsight.open_run(folder)
    steps = list(run.steps())
    assert [step.gradient for step in steps] == ["true", "true"], steps
    total = torch.stack([each.norm() for each in gradients.values()]).norm()
    assert abs(steps[0].total_norm - total) < 1e-5 * total, (steps[0], total)
    assert abs(steps[0].clip_coef - LIMIT) < 1e-4, steps[0]
    stats = {stat.parameter: stat for stat in run.parameter_stats() if stat.step == 0}
    assert set(stats) == set(gradients)
    for name, stat in stats.items():
        expected = gradients[name]
        assert abs(stat.l2 - expected.norm()) < 1e-5 * expected.norm(), (name, stat, expected)
        assert abs(stat.max_abs - expected.abs().max()) < 1e-5 * stat.max_abs, (name, stat)
    histograms = {each.parameter: each for each in run.histograms() if each.step == 0}
    for name, expected in gradients.items():
        assert sum(histograms[name].bins()[0]) == expected.numel(), (name, histograms[name])
    dumped = folder / "gradient_dumper" / "step0" / "full_gradients"
    names = list(get_checkpoint_metadata(dumped).tensors)
    assert sorted(names) == sorted(gradients)
    for name, tensor in zip(names, load_keys(dumped, names), strict=True):
        assert torch.allclose(tensor.double(), gradients[name], rtol=1e-4, atol=1e-7), name
    assert not list(run.problems()), list(run.problems())


def pipeline(folder: Path) -> None:
    """Every rank has other parameters: refused on all of them, before anything is written."""
    layers = nn.ModuleDict({f"layer{dist.get_rank()}": nn.Linear(4, 4)})
    stage = PipelineStage(
        layers["layer" + str(dist.get_rank())], dist.get_rank(), 4, torch.device("cpu")
    )
    Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    with pytest.raises(gradsight.GradsightError, match="as the stages of a pipeline do"):
        gradsight.watch(layers, optimizer, run_dir=folder)
    assert not folder.exists()


def main(folder: Path) -> None:
    for name, (between, spread) in KINDS.items():
        net = Net(between)
        twin = copy.deepcopy(net).double()
        train(net, spread(net), folder / name)
        dist.barrier()
        if dist.get_rank() == 0:
            check(twin, folder / name)
            print(f"{name} is exact")
    net = Net()
    train(net, tensor_and_sharded(net), folder / "begun alone")
    pipeline(folder / "pipeline")
    if dist.get_rank() == 0:
        print("pipeline is refused")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
