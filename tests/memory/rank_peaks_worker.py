"""Run by every rank of test_ranks: the real peak of a training step under DDP and FSDP2.

What is alive before the step, and how far the allocator rises within it. The profiler's running
level would not do: what gloo's threads free is not recorded, so that it drifts from step to step.
Within a step it can drift as well, and only upwards: the least of several steps is nearest.
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
from gradsight.memory.allocator import allocator_peak
from gradsight.memory.counter import storages

STEPS = 12


def blocks_of(model: nn.Module) -> Any:
    inner: Any = model
    return inner.transformer.h if hasattr(inner, "transformer") else inner.model.layers


def wrapped(model: nn.Module, parallel: str) -> nn.Module:
    if parallel == "ddp":
        return DistributedDataParallel(model)
    for block in blocks_of(model):
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


def peak(folder: str, parallel: str, policy: str, optimizer: str) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    nothing = alive()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.train()
    if policy != "none":
        apply_checkpointing(plain, policy)
    model = wrapped(plain, parallel)
    made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer](model.parameters())
    tokens = torch.randint(0, config.vocab_size, (2, 64))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        made.step()

    for _ in range(3):
        step()
        made.zero_grad()
    before = alive() - nothing
    rises = []
    for _ in range(STEPS):
        rises.append(allocator_peak(step).everything)
        made.zero_grad()
    if parallel == "ddp":  # one copy of all gradients, which Python does not see
        before += sum(4 * parameter.numel() for parameter in model.parameters())
    return before + min(rises)


def main() -> None:
    dist.init_process_group("gloo")
    found = {}
    for name in sys.argv[1:]:
        folder, parallel, policy, optimizer = name.split(",")
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak(folder, parallel, policy, optimizer))
        found[name] = max(peaks)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


main()
