"""Threads that train at once, each with a model, an optimizer and a watch of its own.

Every try is a process of its own, as what can go wrong is a crash. It compares every norm of every
step with the same training in float64, and the weights bit for bit with plain training.

    python tests/session/threads_campaign.py [--tries 20] [--scene four]

A part of `make soak`.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

STEPS = 25


@dataclass
class Trainee:
    """One model with all that trains it; the same seed gives the same training."""

    seed: int
    run_dir: Path | None = None
    norms: list[float] = field(default_factory=list)
    scaled: bool = False

    def __post_init__(self) -> None:
        import torch
        from torch import nn

        generator = torch.Generator().manual_seed(self.seed)
        width = 8 + 4 * (self.seed % 3)
        self.model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        self.twin = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + self.seed))
        self.batches = [
            [torch.randn(16, size, generator=generator) * 3 for size in (8, 4)]
            for _ in range(2 * STEPS)
        ]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        import gradsight

        if self.run_dir is None:
            yield
            return
        with gradsight.watch(self.model, self.optimizer, run_dir=self.run_dir, quiet=True):
            yield

    def step(self, number: int) -> None:
        """Two micro-batches, clipped."""
        import torch

        if self.run_dir is not None:
            self.norms.append(self._expected(number))
        for x, y in self.batches[2 * number : 2 * number + 2]:
            loss = (self.model(x) - y).square().mean() / 2
            (self.scaler.scale(loss) if self.scaled else loss).backward()
        if self.scaled:
            self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        if self.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _expected(self, number: int) -> float:
        import torch

        self.twin.load_state_dict(self.model.state_dict())
        pairs = [[t.double() for t in pair] for pair in self.batches[2 * number : 2 * number + 2]]
        losses = [(self.twin(x) - y).square().mean() / 2 for x, y in pairs]
        slopes = torch.autograd.grad(sum(losses), list(self.twin.parameters()))
        return float(torch.stack([slope.square().sum() for slope in slopes]).sum().sqrt())

    def train(self) -> None:
        for number in range(STEPS):
            self.step(number)

    def train_watched(self, all_here: threading.Barrier) -> None:
        """In a watch of this thread's; none is opened or closed while another thread steps.

        torch iterates over its hooks of all optimizers without a lock.
        """
        with self.watched():
            all_here.wait()
            self.train()
            all_here.wait()

    def check(self) -> None:
        """What was recorded is right, and training was left alone."""
        import torch

        import gradsight

        plain = Trainee(self.seed, scaled=self.scaled)
        plain.train()
        pairs = zip(self.model.parameters(), plain.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), "training was changed"
        if self.run_dir is None:
            return
        steps = list(gradsight.open_run(self.run_dir).steps())
        assert [step.step for step in steps] == list(range(STEPS)), f"{len(steps)} steps"
        for step, norm in zip(steps, self.norms, strict=True):
            assert step.gradient == "true", f"step {step.step}: {step.gradient}"
            assert step.total_norm is not None
            wrong = abs(step.total_norm - norm) > 1e-5 * norm
            assert not wrong, f"step {step.step}: {step.total_norm} for {norm}"


def together(*actions: Callable[[], Any]) -> None:
    """Each in a thread of its own; the first fault is raised here."""
    with ThreadPoolExecutor(len(actions)) as pool:
        started = threading.Barrier(len(actions))

        def run(action: Callable[[], Any]) -> None:
            started.wait()
            action()

        for future in [pool.submit(run, action) for action in actions]:
            future.result()


def two(folder: Path) -> None:
    _several(folder, 2)


def four(folder: Path) -> None:
    _several(folder, 4)


def scaled(folder: Path) -> None:
    """Loss scales of several scalers, and none."""
    _watched_together([Trainee(n, folder / str(n), scaled=n < 2) for n in range(3)])


def _several(folder: Path, count: int) -> None:
    _watched_together([Trainee(number, folder / str(number)) for number in range(count)])


def _watched_together(trainees: list[Trainee]) -> None:
    all_here = threading.Barrier(len(trainees))
    together(*(partial(trainee.train_watched, all_here) for trainee in trainees))
    for trainee in trainees:
        trainee.check()


def unwatched_beside(folder: Path) -> None:
    """The one that is watched is opened here and trained elsewhere."""
    trainee, other = Trainee(0, folder / "0"), Trainee(1)
    with trainee.watched():
        together(trainee.train, other.train)
    trainee.check()
    other.check()


def from_thread_to_thread(folder: Path) -> None:
    """Every step is made by whichever worker is free, as pools of threads do."""
    trainees = [Trainee(number, folder / str(number)) for number in range(2)]
    with trainees[0].watched(), trainees[1].watched(), ThreadPoolExecutor(3) as pool:
        for number in range(STEPS):
            for future in [pool.submit(trainee.step, number) for trainee in trainees]:
                future.result()
    for trainee in trainees:
        trainee.check()


def one_model(folder: Path) -> None:
    """Hogwild: nothing that is recorded may be called true once threads write at once."""
    import torch

    import gradsight

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for _ in range(2)]
    # Cleared in place and stepped in turn: whoever takes gradients or weights away from under
    # another thread's backward brings torch itself to fall.
    model(torch.zeros(1, 64)).sum().backward()
    all_here = threading.Barrier(2)
    stepping = threading.Lock()

    def meet(grad: Any) -> None:
        all_here.wait()

    def train(optimizer: Any) -> None:
        for _ in range(STEPS):
            half = model[:3](torch.randn(64, 64))
            output = model[3:](half)
            # Both are inside of backward before either writes a gradient, and neither ends before
            # both have written those of the upper half.
            half.register_hook(meet)
            output.register_hook(meet)
            output.square().mean().backward()
            all_here.wait()
            with stepping:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            all_here.wait()

    with gradsight.watch(model, optimizers, run_dir=folder, quiet=True):
        together(*(lambda each=each: train(each) for each in optimizers))
    run = gradsight.open_run(folder)
    words = [step.gradient for step in run.steps()]
    assert "written by several threads at once" in words, words
    first = words.index("written by several threads at once")
    assert set(words[first:]) == {"written by several threads at once"}, words
    assert any("several threads" in problem.message for problem in run.problems())


SCENES: dict[str, Callable[[Path], None]] = {
    scene.__name__: scene
    for scene in (two, four, scaled, unwatched_beside, from_thread_to_thread, one_model)
}


def attempt(scene: str) -> str | None:
    """Run a scene in a process of its own; what went wrong, or None."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--scene", scene, "--here", folder, "--tries", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return f"{scene}: exit {done.returncode}: {lines[-1] if lines else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--scene", choices=SCENES)
    parser.add_argument("--here", type=Path, help="try in this process, with this folder for runs")
    options = parser.parse_args()
    scenes = [options.scene] if options.scene else list(SCENES)
    if options.here:
        for number in range(options.tries):
            for scene in scenes:
                SCENES[scene](options.here / f"{scene}{number}")
        return
    failures = 0
    for scene in scenes:
        faults = [fault for _ in range(options.tries) if (fault := attempt(scene)) is not None]
        failures += len(faults)
        print(f"{scene}: {options.tries} tries, {len(faults)} failures", flush=True)
        for fault in faults[:3]:
            print(f"  {fault}", flush=True)
    tries = options.tries * len(scenes)
    promise = "threads that train at once: no crash, exact norms, the same weights"
    print(json.dumps({"promise": promise, "tries": tries, "failures": failures}))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
