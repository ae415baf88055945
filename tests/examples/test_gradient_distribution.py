"""Seed 3, typed as it is written: the function, its four test cases, and the trainer's looks."""

import os
import re
import runpy
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import gradsight
import warm
from examples.seed_lines import proves
from gradsight import MetricsTracker, open_run
from gradsight.cli import main
from store.wandb_file import runs
from train.small import TINY, write_text

TREE = Path(__file__).parents[2]
EXAMPLE = TREE / "examples" / "gradient_distribution"
Rows = dict[int, dict[str, Any]]


def run_example(folder: Path, *flags: str) -> str:
    """What the example prints, run as its page says from the root of the repository."""
    command = ["examples/gradient_distribution/train.py", "--run_dir", folder, *flags]
    done = warm.run(
        command,
        cwd=TREE,
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked(folder: Path) -> Rows:
    """The rows of the example's W&B run, by epoch."""
    (run,) = runs(folder)
    return run.by_step()


def looks(rows: Rows) -> list[int]:
    """The epochs at which the distribution was logged."""
    return [epoch for epoch, row in rows.items() if "gradients/histogram" in row]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten epochs of the example."""
    place = tmp_path_factory.mktemp("seed3") / "run"
    printed = run_example(place)
    assert "in " + str(place) + ": wandb/, run.sqlite" in printed
    return place


@proves(3, "Test Case 1: W&B shows `gradients/layer.0.attn/norm` of 12 layers over 10 epochs")
@proves(
    3,
    "a norm per layer, `gradients/layer.0.attn.norm`",
    "`gradients/layer.0.attn/norm`, as its test case writes it, and each parameter's",
)
@proves(3, "logged by the tracker's `log_scalar(name, value, step)`")
def test_case_1_per_layer_norm_logging(folder: Path) -> None:
    rows = tracked(folder)
    assert looks(rows) == [0, 5, 10]
    for layer in range(12):
        for part in ("attn", "mlp", "attn.out.weight"):
            series = [rows[epoch][f"gradients/layer.{layer}.{part}/norm"] for epoch in looks(rows)]
            assert all(norm > 0 for norm in series)
            assert len(set(series)) == 3
    last = rows[10]
    parts = [last[name] ** 2 for name in last if re.fullmatch(r"gradients/\w+/norm", name)]
    assert sum(parts) ** 0.5 == pytest.approx(last["gradients/total_norm"], rel=1e-6)


@proves(3, "Test Case 2: a vanishing layer 11 (below 0.001) is 100 times below layer 0")
def test_case_2_vanishing_gradient_detection(tmp_path: Path) -> None:
    run_example(tmp_path, "--vanishing_layer", "11", "--epochs", "1", "--steps", "2")
    rows = tracked(tmp_path)
    assert looks(rows) == [0, 1]
    for epoch in looks(rows):
        norms = [rows[epoch][f"gradients/layer.{layer}.attn/norm"] for layer in range(12)]
        assert norms[11] < 0.001
        assert norms[0] > 100 * norms[11]
        assert min(norms[:11]) > 100 * norms[11]


@proves(
    3,
    "Test Case 3: `gradients/histogram` is a bell centred at 0, most values in [-0.1, 0.1]",
    "as written; what lies outside its range is counted in `gradients/histogram_outside`",
)
@proves(3, "`wandb.Histogram` of all gradients", "as written, in 101 bins instead of every entry")
def test_case_3_histogram_visualization(folder: Path) -> None:
    for row in [row for row in tracked(folder).values() if "gradients/histogram" in row]:
        counts, edges = row["gradients/histogram"]["values"], row["gradients/histogram"]["bins"]
        middle = len(counts) // 2
        assert edges[middle] == pytest.approx(-edges[middle + 1])
        assert counts[middle] == max(counts)
        # It falls to both sides, from one power of two to the next, and does not rise at the ends.
        for side in (counts[middle:], counts[middle::-1]):
            assert all(near >= 0.9 * far for near, far in pairwise(side))
            assert side[-1] < 0.1 * side[0]
        assert row["gradients/share_within_0.1"] > 0.95
        assert 0 <= row["gradients/histogram_outside"] <= 0.01


@proves(3, "Test Case 4: `log_grad_dist_every=5`, 10 epochs: logged at epochs 0, 5, 10")
def test_case_4_logging_frequency_control(folder: Path, tmp_path: Path) -> None:
    assert looks(tracked(folder)) == [0, 5, 10]
    name = "gradients/layer.0.attn/norm"
    assert [scalar.step for scalar in open_run(folder).scalars(name)] == [0, 5, 10]
    run_example(tmp_path, "--log_grad_dist_every", "3", "--layers", "1", "--steps", "1")
    assert looks(tracked(tmp_path)) == [0, 3, 6, 9, 10]


@proves(3, "without W&B the rest goes on", "as written; the example then logs to TensorBoard")
def test_tensorboard_where_wandb_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags = ["--run_dir", str(tmp_path), "--layers", "1", "--steps", "1", "--epochs", "2"]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    runpy.run_path(str(EXAMPLE / "train.py"), run_name="__main__")
    assert f"in {tmp_path}: tensorboard/, run.sqlite" in capsys.readouterr().out
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    points = [event.step for event in events.Scalars("gradients/layer.0.attn/norm")]
    assert points == [0, 2]
    assert [event.step for event in events.Histograms("gradients/histogram")] == [0, 2]


@proves(
    3,
    "`_log_gradient_distribution(model, tracker, step, log_histogram=False)`",
    "as written, and as `log_gradient_distribution`; it returns {parameter: norm}, not None",
)
@proves(3, "modules without gradients (frozen layers) are handled")
def test_the_function_by_the_seeds_name() -> None:
    class Prints:
        use_wandb = False

        def __init__(self) -> None:
            self.seen: dict[str, float] = {}

        def log_scalar(self, name: str, value: float, step: int) -> None:
            self.seen[name] = value

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    model(torch.ones(1, 3)).sum().backward()
    tracker = Prints()
    norms = gradsight._log_gradient_distribution(model, tracker, step=0, log_histogram=True)
    assert set(norms) == {"1.weight", "1.bias"}
    shown = {f"gradients/{name}/norm" for name in ("1", "1.weight", "1.bias")}
    assert set(tracker.seen) == shown | {"gradients/total_norm"}


@proves(
    3,
    "called in the training loop every 5 epochs, configurable by `log_grad_dist_every`",
    "`gradsight train --epochs 10 --log_grad_dist_every 5`",
)
def test_the_trainers_looks(tmp_path: Path) -> None:
    (tmp_path / "keep.txt").write_text("\n".join(map(str, range(9))))
    options = TINY | {
        "data": write_text(tmp_path / "text"),
        "data_weights": tmp_path / "keep.txt",
        "results_dir": tmp_path / "Results",
        "experiment": "a",
        "method": "Regular",
        "model.n_layer": 1,
        "startup_report": "false",
        "trainer.callbacks.ghost.self_check": "false",
    }
    del options["max_steps"]
    flags = [f"--{name}={value}" for name, value in options.items()]
    assert main(["train", *flags, "--epochs", "10", "--log_grad_dist_every", "5"]) == 0
    run = open_run(tmp_path / "Results" / "a")
    name = "gradients/transformer.h.0.attn/norm"
    assert [scalar.step for scalar in run.scalars(name)] == [0, 5, 10]


@proves(
    3,
    "`MetricsTracker(use_wandb=use_wandb)`, `tracker.log_epoch(epoch, ...)`, `tracker.use_wandb`",
)
def test_the_tracker_as_the_seeds_loop_uses_it(tmp_path: Path) -> None:
    with MetricsTracker(tmp_path, use_wandb=False) as tracker:
        tracker.log_epoch(3, train_loss=0.5)
        assert tracker.use_wandb is False
    (scalar,) = open_run(tmp_path).scalars("train_loss")
    assert (scalar.step, scalar.value) == (3, 0.5)


@proves(
    3,
    "no histogram above 500 million parameters, or it runs out of memory",
    "at any size: large gradients are sampled, and no entry becomes a Python number",
)
def test_a_large_gradient_is_sampled(tmp_path: Path) -> None:
    model = nn.Linear(1500, 1500, bias=False)
    model.weight.grad = torch.randn(1500, 1500)
    with MetricsTracker(tmp_path) as tracker:
        gradsight.log_gradient_distribution(model, tracker, 0, log_histogram=True)
    (histogram,) = open_run(tmp_path).histograms(None)
    assert histogram.sampled < histogram.size == 1500**2


@pytest.mark.slow
@proves(
    3,
    "no performance degradation (below 1%)",
    "`benchmarks/overhead.py --only looks` prints what a look every 5 epochs costs",
)
def test_the_benchmark_of_looks_runs() -> None:
    command = ["benchmarks/overhead.py", "--only", "looks", "--pairs", "1"]
    done = warm.run(command, cwd=TREE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "every 5 epochs of   10 steps" in done.stdout
    assert re.search(r"\d% .*\d% .*\d%  plain training again \(A/A\)", done.stdout)
    assert re.search(r"\d% .*\d% .*\d%  a look: norms, into the record", done.stdout)


def test_the_page_shows_what_is_run() -> None:
    page = (EXAMPLE / "README.md").read_text()
    script = (EXAMPLE / "train.py").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for line in snippet.splitlines():
        assert line.strip() in script
    commands = re.findall(r"```sh\n(.*?)\n```", page, re.DOTALL)
    assert commands == [
        "python examples/gradient_distribution/train.py",
        "python examples/gradient_distribution/train.py --vanishing_layer 11 "
        "--run_dir runs/vanishing",
    ]
