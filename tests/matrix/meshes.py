"""Meshes of several kinds on four ranks; rank 0 prints what became of every instrument.

Called by torchrun as: meshes.py FOLDER
"""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from matrix.instruments import NotApplicable, outcomes
from matrix.nets import ROWS, STEPS, Gradients, gradients_of, weights_of
from matrix.settings import Setting, Work

WORDS, WIDTH, HIDDEN, LENGTH, DEPTH = 11, 8, 256, 32, 4
FACTOR = 0.1
"""The factor for clipping. torch cannot compute a norm over parameters on different meshes."""
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
        if mine.requires_grad:
            # Its gradient is of all ranks' tokens; that of the other parameters is a mean over ranks.
            mine.register_hook(lambda gradient: gradient / dist.get_world_size())
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


class Layers(nn.Module):
    """What checkpointing computes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, between: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.between = between()
        self.layers = nn.ModuleList([Layers() for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        x = x + self.between(x)
        for layers in self.layers:
            x = x + layers(x)
        # A copy: FSDP2 warns of views as results.
        return self.head(self.norm(x)).clone()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


# How the model lies on the ranks; each returns the rows and positions of this rank.

Part = tuple[slice, slice]


def tensor_parallel(net: nn.Module) -> Part:
    mesh = init_device_mesh("cpu", (4,))
    parallelize_module(
        net, mesh, {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    )
    return slice(None), slice(None)


def sequence_parallel(net: nn.Module) -> Part:
    """Norms have summands of their gradients on the ranks."""
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(net, init_device_mesh("cpu", (4,)), plan)
    return slice(None), slice(None)


def tensor_and_sharded(net: nn.Module) -> Part:
    """Some parameters lie on both axes, some on one, and are replicated on the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
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


class Mesh(Setting):
    """A model that lies on four ranks in some way."""

    def __init__(self, between: type[nn.Module], spread: Callable[[Any], Part]) -> None:
        self._between = between
        self._spread = spread

    def train(self, work: Work) -> list[Tensor]:
        net = Net(self._between)
        work.prepare(net)
        part = self._spread(net)
        batch = X[part], Y[part]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with contextlib.ExitStack() as stack:
            if work.watch is not None:
                stack.enter_context(gradsight.watch(net, optimizer, **work.watch))
            engine = None
            if work.scores is not None:
                engine = gradsight.GhostEngine(
                    net, loss_of, batch, optimizer=optimizer, run_dir=work.scores
                )
                stack.callback(engine.close)
            for step in range(STEPS):
                with engine.observe() if engine else contextlib.nullcontext():
                    (loss_of(net, batch) * work.spoils(step)).backward()
                clip(net)
                optimizer.step()
                optimizer.zero_grad()
        return weights_of(net)

    def clip_coef(self, norm: float) -> float:
        return FACTOR

    def gradients(self) -> Gradients:
        return gradients_of(Net(self._between).double(), lambda twin: loss_of(twin, (X, Y)))

    def scores(self) -> Tensor:
        raise AssertionError("scores under such a mesh have no twin yet: they are to be refused")


def clip(net: nn.Module) -> None:
    norm = torch.tensor(1.0)
    nn.utils.clip_grads_with_norm_(net.parameters(), FACTOR, norm, foreach=False)


class Stages(Setting):
    """Every rank has other parameters."""

    def train(self, work: Work) -> list[Tensor]:
        if work.scores is not None:
            raise NotApplicable("an engine takes a model and its loss: a stage has no loss")
        rank = dist.get_rank()
        torch.manual_seed(rank)
        parts = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)]
        layers = nn.ModuleDict({f"layer{rank}": nn.Sequential(*parts)})
        work.prepare(layers)
        stage = PipelineStage(layers[f"layer{rank}"], rank, 4, torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
        with contextlib.ExitStack() as stack:
            if work.watch is not None:
                stack.enter_context(gradsight.watch(layers, optimizer, **work.watch))
            for _ in range(STEPS):
                if rank == 0:
                    schedule.step(x)
                else:
                    schedule.step(target=x)
                optimizer.step()
                optimizer.zero_grad()
        return weights_of(layers)


def main(folder: Path) -> None:
    for name, (between, spread) in KINDS.items():
        tell(name, outcomes(Mesh(between, spread), folder / name))
    tell("pipeline", outcomes(Stages(), folder / "pipeline"))
    # Steps of one process go before these, and steps of one process come after those.
    work = Work(watch={"run_dir": folder / "begun alone"})
    Mesh(*KINDS["tensor and sharded"]).train(work)


def tell(name: str, found: dict[str, str]) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
