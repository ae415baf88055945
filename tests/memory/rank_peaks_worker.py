"""Run by every rank of test_ranks: the real peak of a training step under DDP and FSDP2.

What is alive before the step, and how far the allocator rises within it. The profiler's running
level would not do: what gloo's threads free is not recorded, so that it drifts from step to step.
Within a step it can drift as well: the reading that counts is the one with the least left over at
its end. (Of a Mixtral, steps that drifted read 3% to 14% too much, and the others all the same.)
"""

import gc
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradsight import apply_checkpointing
from gradsight.memory.counter import storages
from gradsight.memory.workload import model_loss
from memory.allocator import allocator_peak

STEPS = 8
WIDTH = 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 101)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def build() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Model(), (torch.randint(0, 101, (4, 128)),)


def build_mixtral() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    tokens = torch.randint(0, 64, (4, 32))
    return transformers.MixtralForCausalLM(config), {"input_ids": tokens, "labels": tokens}


BUILDS: dict[str, Any] = {"small": build, "mixtral": build_mixtral}


def wrapped(model: Any, parallel: str) -> nn.Module:
    if parallel == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks if isinstance(model, Model) else model.model.layers:
        fully_shard(block)
    return fully_shard(model)


def alive() -> int:
    """The bytes of all storages that a tensor of Python's refers to."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.device.type == "cpu":
            for storage in storages(each):
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def peak(name: str, parallel: str, policy: str, optimizer: str) -> int:
    nothing = alive()
    plain, batch = BUILDS[name]()
    if policy != "none":
        apply_checkpointing(plain, policy)
    model = wrapped(plain, parallel)
    made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer](model.parameters())

    def step() -> None:
        model_loss(model, batch).backward()
        made.step()

    for _ in range(3):
        step()
        made.zero_grad()
    before = alive() - nothing
    readings = []
    for _ in range(STEPS):
        readings.append(allocator_peak(step))
        made.zero_grad()
    if parallel == "ddp":  # one copy of all gradients, which Python does not see
        before += sum(4 * parameter.numel() for parameter in model.parameters())
    return before + min(readings, key=lambda read: (read.left, read.everything)).everything


def main() -> None:
    dist.init_process_group("gloo")
    found = {}
    for name in sys.argv[1:]:
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak(*name.split(",")))
        found[name] = max(peaks)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
