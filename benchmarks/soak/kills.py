"""kill -9 at random moments: of watched loops, writers of dumps, scores, incidents, and of train.

    python benchmarks/soak/kills.py --scale 1

Everything is trained twice: once left alone, once killed. What the killed one has left must be a
beginning of what the other has, without gaps, and the next one must go on from it.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forks import ended, holds, import_everything, kill_after, start, tell
from safetensors.torch import load_file
from torch import nn

import gradsight
from gradsight.cli import main as gradsight_command
from gradsight.dump.reader import dumps_in
from gradsight.dump.verify import verify
from gradsight.store.incidents import read_incidents
from gradsight.train.checkpoint import newest

STEPS = 60
LOST = 2
"""Steps under way when the process is killed."""
UNSAVED = 4
"""Scored steps that may be lost: two make a file, and one file is on its way."""
Train = Callable[[Path, int], None]


def model_of(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))


def loop(run_dir: Path, pipe: int, **options: Any) -> None:
    """Train; every step that is made is one byte in the pipe."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    spoilt = options.pop("spoilt", False)
    with gradsight.watch(model, optimizer, run_dir=run_dir, start_step=0, quiet=True, **options):
        for step in range(STEPS):
            torch.manual_seed(step)
            factor = float("inf") if spoilt and step % 7 == 5 else 1.0
            (model(torch.randn(4, 8)) * factor).square().mean().backward()
            if factor != 1.0:
                # The weights stay finite, so that every such step is an incident of its own.
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.zero_()
            optimizer.step()
            optimizer.zero_grad()
            os.write(pipe, b".")


def plain(run_dir: Path, pipe: int) -> None:
    loop(run_dir, pipe)


def with_dumps(run_dir: Path, pipe: int) -> None:
    loop(run_dir, pipe, dump=gradsight.GradientDumper(run_dir, keep_last=3))


def with_incidents(run_dir: Path, pipe: int) -> None:
    loop(run_dir, pipe, recorder="batch", spoilt=True)


def with_scores(run_dir: Path, pipe: int) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(model: nn.Module, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return (model(rows[0]) - rows[1]).square().mean()

    target = (torch.ones(3, 8), torch.ones(3, 1))
    engine = gradsight.GhostEngine(
        model, loss, target, optimizer=optimizer, run_dir=run_dir, save_interval=2
    )
    for step in range(STEPS):
        torch.manual_seed(step)
        rows = (torch.randn(4, 8), torch.randn(4, 1))
        with engine.observe(list(range(4 * step, 4 * step + 4))):
            loss(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(pipe, b".")
    engine.close()


# What must hold of what was left.


def steps_hold(killed: Path, whole: Path, made: int) -> None:
    # A total norm that is not a number is not equal to itself: compared as text.
    expected = [(step.step, repr(step.total_norm)) for step in gradsight.open_run(whole).steps()]
    found = [(step.step, repr(step.total_norm)) for step in gradsight.open_run(killed).steps()]
    assert found == expected[: len(found)], f"other steps: {found[-3:]}"
    assert len(found) >= made - LOST, f"{made} steps were made, {len(found)} are recorded"


def dumps_hold(killed: Path, whole: Path, made: int) -> None:
    steps_hold(killed, whole, made)
    for dump in dumps_in(killed):
        folder = killed / "gradient_dumper" / f"step{dump.step}" / "full_gradients"
        assert verify(folder).intact, folder


def scores_in(run_dir: Path) -> dict[tuple[int, int], float]:
    table = gradsight.read_scores(run_dir).to_pylist()
    return {(row["step"], row["sample_id"]): row["score"] for row in table}


def scores_hold(killed: Path, whole: Path, made: int) -> None:
    if not list((killed / "grad_dotprods").glob("iter_*.parquet")):
        assert made <= UNSAVED, f"{made} steps were made, and no score was saved"
        return
    expected = scores_in(whole)
    found = scores_in(killed)
    assert all(expected[key] == value for key, value in found.items()), "other scores"
    steps = sorted({step for step, _ in found})
    assert steps == list(range(len(steps))), "a gap"
    assert len(steps) >= made - UNSAVED, f"{made} steps were made, {len(steps)} are scored"


def incidents_hold(killed: Path, whole: Path, made: int) -> None:
    steps_hold(killed, whole, made)
    for incident in read_incidents(killed):
        assert incident.damage is None, incident


def continues(run_dir: Path) -> None:
    """The next process goes on after what is recorded."""
    before = len(list(gradsight.open_run(run_dir).steps())) if run_dir.exists() else 0
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with gradsight.watch(model, optimizer, run_dir=run_dir, quiet=True):
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
    steps = [step.step for step in gradsight.open_run(run_dir).steps()]
    assert steps == list(range(before + 2)), steps


def campaign(train: Train, check: Callable[[Path, Path, int], None], tries: int) -> int:
    """How many of the kills left something that does not hold."""
    place = Path(tempfile.mkdtemp(prefix="kills"))
    said = place / "said"
    silent = os.open(os.devnull, os.O_WRONLY)
    began = time.monotonic()
    assert ended(start(lambda: train(place / "whole", silent), said)) == 0, said.read_text()
    took = time.monotonic() - began
    failures = 0
    for _ in range(tries):
        killed = place / "killed"
        shutil.rmtree(killed, ignore_errors=True)
        said.write_text("")
        read, write = os.pipe()
        child = start(lambda: train(killed, write), said)  # noqa: B023
        os.close(write)
        kill_after(child, random.uniform(0.0, took))
        made = len(os.read(read, 1 << 16))
        os.close(read)
        if made == 0 and not (killed / "run.sqlite").exists():
            continue
        good = holds(lambda: check(killed, place / "whole", made), said)  # noqa: B023
        if train is not with_scores:
            good = holds(lambda: continues(killed), said) and good  # noqa: B023
        failures += not good
    shutil.rmtree(place)
    return failures


# The trainer.


def train_command(place: Path, results: Path, *flags: str) -> Callable[[], None]:
    """`gradsight train` on the text in a folder."""
    options = {
        "model.n_layer": 1, "model.n_embd": 16, "block_size": 16, "batch_size": 2,
        "max_steps": 24, "checkpoint_interval": 2, "eval_interval": 100, "eval_samples": 2,
        "val_batch_size": 2, "dot_prod_save_interval": 3, "startup_report": "false",
        "data": place / "text.txt", "results_dir": results,
    }  # fmt: skip
    tokens = [f"--{name}={value}" for name, value in options.items()]

    def script() -> None:
        raise SystemExit(gradsight_command(["train", *tokens, *flags]))

    return script


def tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    folder = newest(run_dir)
    assert folder is not None
    return load_file(folder / "tensors.safetensors")


def trainer(tries: int) -> int:
    """Kill `gradsight train` again and again, resume it, and compare the last weights."""
    place = Path(tempfile.mkdtemp(prefix="kills"))
    (place / "text.txt").write_text(
        "".join(f"{number} crows and herons\n" for number in range(400))
    )
    said = place / "said"
    began = time.monotonic()
    code = ended(start(train_command(place, place / "Results", "--experiment=whole"), said))
    assert code == 0, said.read_text()
    took = time.monotonic() - began
    failures = 0
    for number in range(tries):
        name = f"killed{number}"
        code = -9
        for attempt in range(40):
            flags = ["--resume"] if attempt and (place / "Results" / name).exists() else []
            flags.append(f"--experiment={name}")
            child = start(train_command(place, place / "Results", *flags), said)
            patience = random.uniform(0.2, 0.8) * took if attempt < 5 else 1e9
            code = kill_after(child, patience)
            if code != -9:
                break

        def same() -> None:
            whole = tensors(place / "Results" / "whole")
            other = tensors(place / "Results" / name)  # noqa: B023
            assert whole.keys() == other.keys()
            assert all(torch.equal(whole[key], other[key]) for key in whole)

        good = code == 0 and holds(same, said)
        if code != 0:
            print(f"  train ended with {code}: {said.read_text()[-1500:]}")
        failures += not good
    shutil.rmtree(place)
    return failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    import_everything()
    campaigns: dict[str, tuple[Train, Any, int]] = {
        "kill -9 during a watched loop": (plain, steps_hold, 30),
        "kill -9 while dumps are written": (with_dumps, dumps_hold, 15),
        "kill -9 while scores are saved": (with_scores, scores_hold, 15),
        "kill -9 while incidents are written": (with_incidents, incidents_hold, 15),
    }
    for promise, (train, check, tries) in campaigns.items():
        wanted = max(1, round(tries * options.scale))
        tell(promise, wanted, campaign(train, check, wanted))
    wanted = max(1, round(4 * options.scale))
    tell("kill -9 of train, then --resume", wanted, trainer(wanted))
