"""Two gloo ranks: gradients that lie on them in every way, dumped, and gathered by torch itself for
comparison.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gradsight import GradientDumper
from gradsight.core import files, meeting
from gradsight.core.parameters import named_parameters
from gradsight.errors import GradsightWarning

SAID: list[str] = []


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()


def backward(model: nn.Module, width: int) -> None:
    torch.manual_seed(1 + dist.get_rank())
    model(torch.randn(4, width)).square().mean().backward()


def save(model: nn.Module, run: Path) -> None:
    """What every rank agrees the gradients are, from torch's own gathering."""
    truth = {
        named.name: whole(named.tensor.grad)
        for named in named_parameters(model)
        if named.tensor.grad is not None
    }
    if dist.get_rank() == 0:
        torch.save(truth, run / "truth.pt")


def dump(model: nn.Module, run: Path, **options: object) -> GradientDumper:
    run.mkdir(parents=True, exist_ok=True)
    with GradientDumper(run, **options) as full, GradientDumper(run, save_first_n=3) as sampled:
        for step in range(2):
            full.dump(model, step)
            sampled.dump(model, step)
    save(model, run)
    return full


def ddp(out: Path) -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    backward(model, 5)
    dump(model, out / "ddp")


def fsdp(out: Path) -> None:
    """Seven rows are shared unevenly, one row leaves the second rank without any; the head is not
    sharded.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1), nn.Linear(1, 4))
    fully_shard(model[0])
    fully_shard(model[1])
    backward(model, 5)
    dist.all_reduce(model[2].weight.grad)
    dist.all_reduce(model[2].bias.grad)
    dump(model, out / "fsdp")


def some_none(out: Path) -> None:
    """A plain parameter with a gradient on rank 1 only, one that differs, and a shard that is
    missing on rank 1.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    fully_shard(model[1])
    backward(model, 2)
    model[0].bias.grad.fill_(7.0)
    if dist.get_rank() == 0:
        model[0].weight.grad = None
    else:
        model[0].weight.grad.fill_(5.0)
        model[1].bias.grad = None
    run = out / "some_none"
    with GradientDumper(run) as dumper:
        dumper.dump(model, 0)
        dumper.wait()
        first = dist.get_rank() == 0
        model[0].bias.grad.fill_(1.0 if first else 2.0)
        dumper.dump(model, 1)
    report(run, dumper)


def nothing(out: Path) -> None:
    """No rank has any gradient: no dump, and every rank hears of it."""
    run = out / "nothing"
    with GradientDumper(run) as dumper:
        dumper.dump(nn.Linear(2, 2), 0)
    report(run, dumper)


def troubles(out: Path) -> None:
    """Ranks at different steps, a disk that is full for one of them: no dump, and the next one
    finds them together.
    """
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(20, 20))
    backward(model, 20)
    run, second = out / "troubles", dist.get_rank() == 1
    with GradientDumper(run) as dumper:
        dumper.dump(model, 5 if second else 4)
        dumper.wait()
        write = files.write_all
        files.write_all = no_space if second else write
        dumper.dump(model, 6)
        dumper.wait()
        files.write_all = write
        dumper.dump(model, 7)
    report(run, dumper)


def no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")


def skipping(out: Path) -> None:
    """One rank's buffer is busy: then no rank dumps, and the next dump finds them together."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    backward(model, 2)
    run = out / "skipping"
    with GradientDumper(run) as dumper:
        taken = dumper._pool.take() if dist.get_rank() == 1 else None
        dumper.dump(model, 0)
        dumper.wait()
        if taken is not None:
            dumper._pool.give(taken)
        dumper.dump(model, 1)
    report(run, dumper)


def one_rank_only(out: Path) -> None:
    """Rank 0 dumps, the other never comes: rank 0 is told, goes on, and training's own groups still
    work.
    """
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    run = out / "one_rank_only"
    meeting.PATIENCE = 1.0
    if dist.get_rank() == 0:
        with GradientDumper(run) as dumper:
            assert dumper.dump(model, 0) is None
        report(run, dumper)
    group = dist.new_group(backend="gloo")
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == 2


def report(run: Path, dumper: GradientDumper) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / f"said{dist.get_rank()}.txt").write_text("\n".join(SAID))
    SAID.clear()
    lines = [
        f"{dumper.written} {dumper.skipped} {dumper.failed}",
        *(f"{one.key}: {one.message}" for one in dumper.problems),
    ]
    (run / f"rank{dist.get_rank()}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.simplefilter("always", GradsightWarning)
    warnings.showwarning = lambda message, *_: SAID.append(str(message))
    dist.init_process_group("gloo")
    for scenario in (
        ddp,
        fsdp,
        some_none,
        nothing,
        troubles,
        skipping,
        one_rank_only,
    ):
        scenario(Path(sys.argv[1]))
    dist.destroy_process_group()
