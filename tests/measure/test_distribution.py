"""log_gradient_distribution and MetricsTracker: the scenarios that they were asked for."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gradsight
from gradsight import MetricsTracker, Schedule, log_gradient_distribution, open_run
from gradsight.errors import GradsightWarning, UsageError
from gradsight.values.histograms import Histogram
from store.wandb_file import history


class Transformer(nn.Module):
    """Twelve layers with the names a user would look for."""

    def __init__(self, layers: int = 12, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attn": nn.MultiheadAttention(width, 2, batch_first=True),
                    "mlp": nn.Linear(width, width),
                }
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = x + layer["attn"](x, x, x, need_weights=False)[0]
            x = x + layer["mlp"](x).tanh()
        return x


class Lists:
    """The least a tracker must have, and histograms."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}
        self.pictures: dict[str, list[Histogram]] = {}

    def log_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.setdefault(name, []).append((step, value))

    def log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        self.pictures.setdefault(name, []).append(histogram)


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.randn(4, 6, 16)).square().mean().backward()


def backward_through(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def test_norms_of_every_layer_over_ten_epochs_in_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    model = Transformer()
    norms = []
    with MetricsTracker(tmp_path, use_wandb=True) as tracker:
        assert tracker.use_wandb
        for epoch in range(10):
            backward(model)
            norms.append(log_gradient_distribution(model, tracker, epoch))
    rows = history(tmp_path)
    assert sorted(rows) == list(range(10))
    assert [row["gradsight/step"] for row in rows.values()] == list(range(10))
    for epoch, expected in enumerate(norms):
        assert len(expected) == len(list(model.parameters()))
        for name in ("layer.0.attn.in_proj_weight", "layer.11.mlp.weight"):
            assert rows[epoch][f"gradients/{name}/norm"] == pytest.approx(expected[name])
    assert norms[-1]["layer.3.mlp.weight"] == pytest.approx(
        float(model.layer[3]["mlp"].weight.grad.norm()), rel=1e-5
    )
    recorded = {(scalar.step, scalar.name): scalar.value for scalar in open_run(tmp_path).scalars()}
    assert recorded[9, "gradients/layer.11.mlp.weight/norm"] == pytest.approx(
        norms[9]["layer.11.mlp.weight"]
    )


def test_the_name_with_an_underscore_is_the_same_function() -> None:
    from gradsight import _log_gradient_distribution

    assert _log_gradient_distribution is log_gradient_distribution
    assert "_log_gradient_distribution" not in dir(gradsight)


def test_a_vanishing_layer_stands_out() -> None:
    model = Transformer()
    for parameter in model.layer[11].parameters():
        parameter.register_hook(lambda gradient: gradient * 1e-4)
    backward(model)
    norms = log_gradient_distribution(model, Lists(), 0)
    assert norms["layer.11.mlp.weight"] < 1e-3
    assert norms["layer.0.mlp.weight"] > 100 * norms["layer.11.mlp.weight"]


def test_the_histogram_is_a_curve_centred_on_zero() -> None:
    model = nn.Linear(400, 300, bias=False)
    torch.manual_seed(0)
    model.weight.grad = torch.randn(300, 400) * 0.03
    tracker = Lists()
    log_gradient_distribution(model, tracker, 0, log_histogram=True)
    (histogram,) = tracker.pictures["gradients/histogram"]
    counts, edges = histogram.linear()
    middle = len(counts) // 2
    assert (edges[middle] + edges[middle + 1]) / 2 == pytest.approx(0, abs=1e-12)
    mean = sum(
        count * (low + high) / 2 for count, low, high in zip(counts, edges, edges[1:], strict=False)
    ) / sum(counts)
    assert abs(mean) < 1e-3
    inner = sum(counts[middle - 5 : middle + 6])
    assert inner > sum(counts[:11])
    assert inner > sum(counts[-11:])
    ((step, share),) = tracker.scalars["gradients/share_within_0.1"]
    assert step == 0
    assert share == pytest.approx(math.erf(0.1 / 0.03 / math.sqrt(2)), abs=3 * histogram.error)
    assert share > 0.99


def test_a_sparse_embedding_has_the_histogram_of_a_dense_one(tmp_path: Path) -> None:
    """Logged by hand and recorded by a watch, the zeros of the rows without a token count."""
    pictures, recorded = [], []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(100, 8, sparse=sparse), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tracker, folder = Lists(), tmp_path / str(sparse)
        with gradsight.watch(model, optimizer, run_dir=folder, quiet=True):
            for _ in range(2):
                model(torch.randperm(100)[:38]).square().mean().backward()
                log_gradient_distribution(model, tracker, 0, log_histogram=True)
                optimizer.step()
                optimizer.zero_grad()
        pictures.append((tracker.pictures, tracker.scalars))
        recorded.append(list(open_run(folder).histograms()))
    assert pictures[0] == pictures[1]
    assert recorded[0] == recorded[1]
    found = recorded[0][0]
    assert (found.parameter, found.size, found.sampled) == ("0.weight", 800, 800)
    assert found.zero == 800 - 38 * 8


def test_every_five_epochs_and_after_the_last() -> None:
    model, tracker, due = Transformer(layers=1), Lists(), Schedule(step_interval=5)
    epochs = 10
    for epoch in range(epochs):
        backward(model)
        if due.due(epoch):
            log_gradient_distribution(model, tracker, epoch, log_histogram=True)
    log_gradient_distribution(model, tracker, epochs, log_histogram=True)
    assert [step for step, _ in tracker.scalars["gradients/layer.0.mlp.weight/norm"]] == [0, 5, 10]
    assert [histogram.step for histogram in tracker.pictures["gradients/histogram"]] == [0, 5, 10]


def test_frozen_layers_are_skipped() -> None:
    model = Transformer(layers=2)
    model.layer[0].requires_grad_(False)
    backward(model)
    tracker = Lists()
    norms = log_gradient_distribution(model, tracker, 0, log_histogram=True)
    assert norms
    assert all(name.startswith("layer.1.") for name in norms)
    everything = sum(parameter.numel() for parameter in model.layer[1].parameters())
    assert tracker.pictures["gradients/histogram"][0].size == everything


def test_no_gradients_at_all_is_an_empty_answer() -> None:
    tracker = Lists()
    assert log_gradient_distribution(Transformer(layers=1), tracker, 0, log_histogram=True) == {}
    assert not tracker.scalars


def test_bad_values_are_logged_as_they_are() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.tensor([[1.0, float("nan")], [0.0, 0.0]])
    model.bias.grad = torch.tensor([float("inf"), 1.0])
    norms = log_gradient_distribution(model, Lists(), 0, log_histogram=True)
    assert math.isnan(norms["weight"])
    assert norms["bias"] == math.inf


def test_a_missing_wandb_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(
        GradsightWarning, match="pip install 'gradsight\\[wandb\\]'. Going on without W&B"
    ) as warned:
        tracker = MetricsTracker(tmp_path, use_wandb=True)
    assert len(warned) == 1
    assert not tracker.use_wandb
    backward(model := Transformer(layers=1))
    log_gradient_distribution(model, tracker, 0, log_histogram=True)
    tracker.log_epoch(0, train_loss=1.5, val_loss=2.5)
    tracker.close()
    tracker.close()
    run = open_run(tmp_path)
    values = {scalar.name: scalar.value for scalar in run.scalars()}
    assert values["train_loss"] == 1.5
    assert values["gradients/layer.0.mlp.weight/norm"] > 0
    assert [histogram.parameter for histogram in run.histograms()] == [None]


def test_a_missing_tensorboard_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    expected = "pip install 'gradsight\\[tensorboard\\]'. Going on without TensorBoard"
    with pytest.warns(GradsightWarning, match=expected) as warned:
        tracker = MetricsTracker(tmp_path, use_tensorboard=True)
    assert len(warned) == 1
    assert not tracker.use_tensorboard
    tracker.log_scalar("loss", 1.0, 0)
    tracker.close()
    run = open_run(tmp_path)
    assert [scalar.value for scalar in run.scalars("loss")] == [1.0]
    assert [problem.key for problem in run.problems()] == ["sink-TensorBoard"]


def test_tensorboard_through_the_tracker(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsTracker(tmp_path, use_tensorboard=True) as tracker:
        for step in range(3):
            tracker.log_scalar("loss", 1.0 / (step + 1), step)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([1.0, 0.5, 1 / 3])


def test_a_trackers_steps_are_kept_apart_from_the_optimizers(tmp_path: Path) -> None:
    """Epoch 1 is not step 1, whatever has the same name there."""
    model = nn.Linear(2, 2)
    every = Schedule(step_interval=2)
    with (
        MetricsTracker(tmp_path) as tracker,
        gradsight.watch(model, run_dir=tmp_path, histograms=every) as watched,
    ):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            watched.step(loss=1.0, accuracy=0.5)
        for epoch in (1, 2):
            tracker.log_epoch(epoch, accuracy=0.9)
            log_gradient_distribution(model, tracker, epoch, log_histogram=True)
    run = open_run(tmp_path)
    shares = {"gradients/share_within_0.1"}
    for step in run.steps():
        assert step.scalars["accuracy"] == 0.5
        assert set(step.scalars) - shares == {"accuracy"}
    accuracies = {(scalar.source, scalar.step): scalar.value for scalar in run.scalars("accuracy")}
    steps = {("watch", step): 0.5 for step in range(3)}
    assert accuracies == {**steps, ("tracker", 1): 0.9, ("tracker", 2): 0.9}
    norms = list(run.scalars("gradients/weight/norm"))
    assert [(scalar.source, scalar.step) for scalar in norms] == [("tracker", 1), ("tracker", 2)]
    pictures = [(histogram.source, histogram.step) for histogram in run.histograms(None)]
    assert sorted(pictures) == [("tracker", 1), ("tracker", 2), ("watch", 0), ("watch", 2)]
    assert set(run.to_arrow("scalars")["source"].to_pylist()) == {"watch", "tracker"}


def test_a_resumed_watch_leaves_what_a_tracker_has_counted(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with MetricsTracker(tmp_path) as tracker:
        backward_through(model)
        log_gradient_distribution(model, tracker, 7, log_histogram=True)
    with gradsight.watch(model, run_dir=tmp_path, start_step=3):
        pass
    run = open_run(tmp_path)
    assert {scalar.step for scalar in run.scalars()} == {7}
    assert [histogram.step for histogram in run.histograms()] == [7]


def test_tensorboard_shows_a_tracker_on_a_watchs_run_as_a_run_of_its_own(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = nn.Linear(2, 2)
    with (
        MetricsTracker(tmp_path, use_tensorboard=True) as tracker,
        gradsight.watch(model, run_dir=tmp_path, sinks=["tensorboard"]) as watched,
    ):
        for _ in range(3):
            backward_through(model)
            watched.step()
        norms = log_gradient_distribution(model, tracker, 1)
    name = "gradients/weight/norm"
    seen = {}
    for folder in ("tensorboard", "tensorboard/tracker"):
        events = EventAccumulator(str(tmp_path / folder))
        events.Reload()
        seen[folder] = {event.step: event.value for event in events.Scalars(name)}
    assert sorted(seen["tensorboard"]) == [0, 1, 2]
    assert seen["tensorboard/tracker"] == pytest.approx({1: norms["weight"]})


def test_wrong_arguments() -> None:
    with pytest.raises(UsageError, match="a tracker needs a method log_scalar"):
        log_gradient_distribution(nn.Linear(2, 2), object(), 0)
    with pytest.raises(UsageError, match=r"step must be a whole number of 0 or more, got 1.5"):
        MetricsTracker().log_scalar("x", 1.0, 1.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"step must be below 2\*\*63"):
        MetricsTracker().log_scalar("x", 1.0, 10**30)
