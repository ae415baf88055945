"""What leaving Gradsight on costs: training steps with and without it, side by side, beside other
tools.

Every arm is a process of its own with the same model and data. They take turns, a few steps at a
time; the mean of each arm's faster half counts, as a ratio to plain training. The A/A ratio (plain
training against itself) says how far to trust the rest.

A look of `log_gradient_distribution` is measured in one process, steps with one and without taking
turns: the median of the look itself, and what it comes to when it is taken every five epochs.

    python benchmarks/overhead.py [--pairs 60] [--arms gradsight,wandb,...] [--only watch|looks]
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ARMS = {
    "plain": "plain training",
    "again": "plain training again (A/A)",
    "gradsight": "gradsight.watch: every step, histograms every 50, record on disk",
    "unjudged": "the same without health",
    "unrecorded": "the same without the flight recorder",
    "batch": "the same with a flight recorder that keeps batches",
    "wandb": "wandb.watch, offline, histograms every 50",
    "lightning": "Lightning's grad_norm, every step",
    "loop": "a loop over parameters, every step",
}
LOOKS = {
    "plain": "plain training",
    "again": "plain training again (A/A)",
    "look": "a look: norms, into the record",
    "look_histogram": "a look: norms and histogram, into the record",
    "look_wandb": "a look: norms and histogram, into the record and W&B (offline)",
}
LOOK_EVERY = 5
EPOCHS = (10, 100, 1000)
"""Steps of an epoch that a look is set against."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--only", choices=["watch", "looks"])
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        serve(options.arm, options.model)
        return
    arms = options.arms.split(",")
    title = "GPT, 10.8M parameters, 50 tensors, 4 x 128 tokens"
    if options.only != "looks":
        compare(title, "gpt", arms, options.pairs, steps=1)
        compare("tiny MLP, 6 tensors, a step below 2 ms", "mlp", arms, options.pairs, steps=300)
    if options.only != "watch":
        compare_looks(title, options.pairs)


def compare(title: str, model: str, arms: list[str], pairs: int, steps: int) -> None:
    times = measured(model, arms, pairs, steps)
    plain = faster_half(times["plain"])
    print(f"\n{title}: plain step {plain * 1e3:.2f} ms, {pairs} turns of {steps}")
    for arm in arms[1:]:
        print(f"  {faster_half(times[arm]) / plain:7.3f}x  {ARMS[arm]}")


def compare_looks(title: str, pairs: int) -> None:
    """Steps with a look and without take turns in this process."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    model, optimizer, loss_of = gpt()
    steps: dict[str, list[float]] = {arm: [] for arm in LOOKS}
    alone: dict[str, list[float]] = {arm: [] for arm in LOOKS}
    with tempfile.TemporaryDirectory() as folder, trackers(Path(folder)) as look:
        for turn in range(-2, pairs):  # the first two are for warming up
            for arm in LOOKS:
                started = time.perf_counter()
                loss_of().backward()
                looked = time.perf_counter()
                look(arm, model, turn + 2)
                done = time.perf_counter()
                optimizer.step()
                optimizer.zero_grad()
                if turn >= 0:
                    alone[arm].append(done - looked)
                    steps[arm].append(time.perf_counter() - started)
    plain = statistics.median(steps["plain"])
    print(f"\n{title}: plain step {plain * 1e3:.1f} ms, medians of {pairs}")
    columns = "".join(f"{f'{count} steps':>11}" for count in EPOCHS)
    print(f"      look  the step  every {LOOK_EVERY} epochs of{columns}")
    for arm, name in list(LOOKS.items())[1:]:
        cost = statistics.median(alone[arm])
        ratio = statistics.median(steps[arm]) / plain
        shares = "".join(f"{cost / (LOOK_EVERY * count * plain):>11.4%}" for count in EPOCHS)
        print(f"  {cost * 1e3:5.1f} ms   {ratio:6.3f}x{'':>19}{shares}  {name}")


@contextlib.contextmanager
def trackers(folder: Path) -> Iterator[Callable[[str, Any, int], None]]:
    """Takes the look that an arm stands for."""
    import gradsight

    record = gradsight.MetricsTracker(folder / "record")
    wandb = gradsight.MetricsTracker(folder / "wandb", use_wandb=True)

    def look(arm: str, model: Any, epoch: int) -> None:
        if arm.startswith("look"):
            tracker = wandb if arm == "look_wandb" else record
            gradsight.log_gradient_distribution(model, tracker, epoch, log_histogram=arm != "look")

    with record, wandb:
        yield look


def measured(model: str, arms: list[str], pairs: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step by arm, the arms taking turns."""
    processes = {arm: Arm(arm, model) for arm in arms}
    for arm in processes.values():
        arm.run(max(2, steps // 4))
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(pairs):
        order = arms[turn % len(arms) :] + arms[: turn % len(arms)]
        for arm in order:
            times[arm].append(processes[arm].run(steps) / steps)
    for arm in processes.values():
        arm.close()
    return times


def faster_half(values: list[float]) -> float:
    kept = sorted(values)[: max(1, len(values) // 2)]
    return sum(kept) / len(kept)


class Arm:
    """A process that trains when told to, and says how long it took."""

    def __init__(self, arm: str, model: str) -> None:
        command = [sys.executable, __file__, "--arm", arm, "--model", model]
        environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, steps: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(steps, file=self._process.stdin, flush=True)
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(arm: str, kind: str) -> None:
    """The child: reads how many steps to make, answers with seconds."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        step = STEP[kind](arm, Path(folder))
        for line in sys.stdin:
            started = time.perf_counter()
            for _ in range(int(line)):
                step()
            print(json.dumps(time.perf_counter() - started), flush=True)
        os._exit(0)


def gpt() -> tuple[Any, Any, Callable[[], Any]]:
    """A model, its optimizer, and its loss on a batch."""
    import torch
    from small_gpt import GPT, GPTConfig, next_token_loss

    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 256, (4, 129))
    return model, optimizer, lambda: next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])


def gpt_step(arm: str, folder: Path) -> Callable[[], None]:
    return with_tool(arm, folder, *gpt())


def mlp_step(arm: str, folder: Path) -> Callable[[], None]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    return with_tool(
        arm, folder, model, optimizer, lambda: nn.functional.cross_entropy(model(x), y)
    )


def with_tool(
    arm: str, folder: Path, model: Any, optimizer: Any, loss_of: Callable[[], Any]
) -> Callable[[], None]:
    """One training step with one tool looking on."""
    look: Callable[[], object] = lambda: None  # noqa: E731
    if arm in ("gradsight", "unjudged", "unrecorded", "batch"):
        import gradsight

        recorder = {"unrecorded": False, "batch": "batch"}.get(arm, True)
        gradsight.watch(
            model, optimizer, run_dir=folder / "run", health=arm != "unjudged", recorder=recorder
        )
    elif arm == "wandb":
        import wandb

        run = wandb.init(mode="offline", dir=folder)
        run.watch(model, log="gradients", log_freq=50)
        look = lambda: run.log({})  # noqa: E731
    elif arm == "lightning":
        from lightning.pytorch.utilities import grad_norm

        look = lambda: grad_norm(model, 2)  # noqa: E731
    elif arm == "loop":

        def look():
            return [(p.grad.norm(2).item(), bool(p.grad.isnan().any())) for p in model.parameters()]

    def step() -> None:
        loss_of().backward()
        look()
        optimizer.step()
        optimizer.zero_grad()

    return step


STEP = {"gpt": gpt_step, "mlp": mlp_step}

if __name__ == "__main__":
    main()
