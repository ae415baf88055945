"""Run on two gloo ranks by test_ranks.py: scores under DDP and FSDP2 against one process's."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ghost.small import SmallGPT, direction_of, loss_fn, pair, relative_error, truth
from gradsight import GhostEngine, read_scores
from gradsight.core.group import ProcessGroup

ROWS = 3


def reference() -> SmallGPT:
    torch.manual_seed(0)
    return SmallGPT(vocabulary=23, width=9).double()  # 23 and 9 rows: uneven shards


def wrapped(kind: str, model: SmallGPT) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def local_rows(batch: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    rows = len(batch[0]) // dist.get_world_size()
    return tuple(t[rank * rows : (rank + 1) * rows] for t in batch)


def whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def local(grad: Tensor) -> Tensor:
    return grad.to_local() if hasattr(grad, "to_local") else grad


def check(kind: str, run_dir: str, exact_grad: bool) -> None:
    rank, plain = dist.get_rank(), reference()
    model = wrapped(kind, copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    val = pair(4, 2)
    engine = GhostEngine(
        model,
        loss_fn,
        local_rows(val, rank),
        optimizer=optimizer,
        exact_grad=exact_grad,
        run_dir=run_dir,
        precondition="adam",
    )
    for number in range(3):
        batch = pair(2 * ROWS, 10 + number)
        mine = local_rows(batch, rank)
        with torch.no_grad():
            loss_fn(
                model, mine
            )  # an evaluation, after which FSDP2's outermost parameters are still whole
        with engine.observe(sample_ids=[100 * rank + i for i in range(ROWS)]):
            loss_fn(model, mine).backward()
        named = dict(zip(dict(plain.named_parameters()), model.parameters(), strict=True))
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(whole(named[name].detach()))
        direction = direction_of(plain, val)
        if number:
            for name, parameter in named.items():
                state = optimizer.state[parameter]
                second = whole(state["exp_avg_sq"]) / (1 - 0.999 ** float(state["step"]))
                direction[name] = direction[name] / (second.sqrt() + 1e-8)
        expected = truth(plain, batch, direction)
        found = engine.scores.total
        error = float(
            (found - expected[rank * ROWS : (rank + 1) * ROWS]).abs().max() / expected.abs().max()
        )
        assert error < 1e-9, (kind, rank, number, error)
        plain.zero_grad()
        loss_fn(plain, batch).backward()
        total = found.sum().clone()
        dist.all_reduce(total)
        inner = 0.0
        for name, parameter in plain.named_parameters():
            grad = whole(named[name].grad)
            assert relative_error(grad, parameter.grad) < 1e-12, name
            inner += float((direction[name] * grad).sum())
        assert abs(float(total) - inner) < 1e-9 * abs(inner) + 1e-12
        if exact_grad:
            observed = [p.grad.clone() for p in model.parameters()]
            optimizer.zero_grad()
            loss_fn(model, mine).backward()
            for before, p in zip(observed, model.parameters(), strict=True):
                assert torch.equal(local(before), local(p.grad))
        optimizer.step()
        optimizer.zero_grad()
    report = engine.verify(mine)
    assert report.passed, report
    assert len(report.twin["validation"]) == ROWS
    honesty = engine.honesty()["validation"]
    assert len(honesty.pairs) == 2
    engine.close()
    if rank == 0:
        table = pyarrow.parquet.read_table(
            Path(run_dir) / "grad_dotprods" / "iter_000003.parquet"
        ).to_pylist()
        assert [r["sample_id"] for r in table if r["step"] == 0] == [0, 1, 2, 100, 101, 102]
        assert {r["direction"] for r in table if r["step"] > 0} == {"adam"}
    print(f"{kind} rank {rank} ok", flush=True)


def check_resumed(run_dir: str) -> None:
    """A second engine goes on after the last step on every rank, with sample numbers of its own."""
    rank = dist.get_rank()
    for told, first in ((None, 3), (2, 2)):
        model = DistributedDataParallel(reference())
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        engine = GhostEngine(
            model,
            loss_fn,
            local_rows(pair(4, 2), rank),
            optimizer=optimizer,
            run_dir=run_dir,
            start_step=told,
        )
        for step in (first, first + 1):
            with engine.observe():
                loss_fn(model, local_rows(pair(2 * ROWS, step), rank)).backward()
            assert engine.scores.step == step, (rank, engine.scores.step)
            seen = 2 * ROWS * step + rank
            assert engine.scores.sample_ids == [seen, seen + 2, seen + 4], engine.scores.sample_ids
            optimizer.step()
            optimizer.zero_grad()
        engine.close()
    dist.barrier()
    steps = read_scores(run_dir)["step"].to_pylist()
    assert steps == [step for step in range(4) for _ in range(2 * ROWS)], steps
    print(f"resumed rank {rank} ok", flush=True)


def check_accumulation() -> None:
    """Under DDP's no_sync the micro-batches' scores still add up to <direction, the gradient>."""
    rank, plain = dist.get_rank(), reference()
    model = DistributedDataParallel(copy.deepcopy(plain))
    val, direction = pair(4, 2), None
    engine = GhostEngine(model, loss_fn, local_rows(val, rank))
    direction, total = direction_of(plain, val), torch.zeros((), dtype=torch.float64)
    for micro in range(2):
        mine = local_rows(pair(2 * ROWS, 30 + micro), rank)
        if micro == 0:
            with model.no_sync(), engine.observe(step=0):
                (loss_fn(model, mine) / 2).backward()
        else:
            with engine.observe(step=0):
                (loss_fn(model, mine) / 2).backward()
        total += engine.scores.total.sum()
    dist.all_reduce(total)
    inner = sum(float((direction[n] * p.grad).sum()) for n, p in model.module.named_parameters())
    assert abs(float(total) - inner) < 1e-9 * abs(inner)
    engine.close()
    print(f"accumulation rank {rank} ok", flush=True)


def check_one_pass(kind: str) -> None:
    """One pass: every rank has the same validation rows, so no direction goes over the wire.

    Sharded ranks ask each other once whether the shapes are new to any of them.
    """
    rank, plain = dist.get_rank(), reference()
    model = wrapped(kind, copy.deepcopy(plain))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    val = pair(4, 2)
    engine = GhostEngine(model, loss_fn, val, optimizer=optimizer)
    names = [name for name, _ in plain.named_parameters()]
    for number in range(3):
        batch = pair(2 * ROWS, 10 + number)
        with counted_messages() as messages:
            loss = engine.loss(local_rows(batch, rank))
            loss.backward()
        assert engine.scores.mode == "concat"
        asked = ["sum"] if kind == "fsdp2" else []
        assert number == 0 or messages == asked, messages
        named = dict(zip(names, model.parameters(), strict=True))
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(whole(named[name].detach()))
        expected = truth(plain, batch, direction_of(plain, val))
        mine = expected[rank * ROWS : (rank + 1) * ROWS]
        error = float((engine.scores.total - mine).abs().max() / expected.abs().max())
        assert error < 1e-12, (kind, rank, number, error)
        plain.zero_grad()
        loss_fn(plain, batch).backward()
        for name, parameter in plain.named_parameters():
            assert relative_error(whole(named[name].grad), parameter.grad) < 1e-12, name
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    # Rows of its own on each rank are no one target: two passes, on both.
    model = wrapped(kind, copy.deepcopy(plain))
    engine = GhostEngine(model, loss_fn, local_rows(val, rank))
    with pytest.warns(UserWarning, match="two_pass.*different validation rows"):
        engine.loss(local_rows(batch, rank)).backward()
    assert engine.scores.mode == "two_pass"
    engine.close()
    print(f"{kind} one pass rank {rank} ok", flush=True)


def check_autocast(kind: str) -> None:
    """In bf16 the self-check lets right scores pass, in one pass and in two."""
    rank, exact = dist.get_rank(), reference()
    val, batch = pair(4, 2), pair(2 * ROWS, 10)
    expected = truth(exact, batch, direction_of(exact, val))
    for mode in ("two_pass", "concat"):
        engine = GhostEngine(wrapped(kind, reference().float()), loss_fn, val, mode=mode)
        with torch.autocast("cpu", torch.bfloat16):
            loss = engine.loss(local_rows(batch, rank))
        loss.backward()
        mine = expected[rank * ROWS : (rank + 1) * ROWS]
        error = float((engine.scores.total - mine).abs().max() / expected.abs().max())
        assert error < 5e-2, (mode, error)
        engine.close()
    print(f"{kind} autocast rank {rank} ok", flush=True)


@contextmanager
def counted_messages() -> Iterator[list[str]]:
    """The collectives that the engine's own group is asked for."""
    found: list[str] = []
    kept = {name: getattr(ProcessGroup, name) for name in ("sum", "mean", "gather_rows")}

    def noting(name: str) -> Callable[..., object]:
        def call(self: ProcessGroup, *args: object) -> object:
            found.append(name)
            return kept[name](self, *args)

        return call

    for name in kept:
        setattr(ProcessGroup, name, noting(name))
    try:
        yield found
    finally:
        for name, original in kept.items():
            setattr(ProcessGroup, name, original)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    check(sys.argv[1], sys.argv[2], exact_grad=sys.argv[3] == "exact")
    if sys.argv[3] != "exact":
        check_one_pass(sys.argv[1])
        check_autocast(sys.argv[1])
    if sys.argv[1] == "ddp":
        check_accumulation()
        check_resumed(sys.argv[2])
    dist.destroy_process_group()
