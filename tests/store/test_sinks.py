"""What sinks got is read back from the real files."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from torch import nn

import gradsight
from gradsight.core.problems import Problems
from gradsight.errors import GradsightWarning, MissingPackage, UsageError
from gradsight.store.sinks.queue import SinkQueue
from store.wandb_file import runs

pytestmark = pytest.mark.usefixtures("offline")
STEPS = 6


def train(
    run_dir: Path | None, sinks: Any, layers: int = 2, steps: int = STEPS, **options: Any
) -> list[dict[str, float]]:
    """Returns the norms as the plainest loop sees them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every = gradsight.Schedule(step_interval=3)
    norms = []
    with gradsight.watch(
        model, optimizer, run_dir=run_dir, sinks=sinks, histograms=every, **options
    ) as watched:
        for _ in range(steps):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            norms.append(
                {name: float(parameter.grad.norm()) for name, parameter in model.named_parameters()}
            )
            optimizer.step()
            optimizer.zero_grad()
            watched.log(loss=loss, accuracy=0.5)
    return norms


def test_tensorboard(tmp_path: Path) -> None:
    norms = train(tmp_path, ["tensorboard"])
    events = EventAccumulator(
        str(tmp_path / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0}
    )
    events.Reload()
    for name in norms[0]:
        points = {event.step: event.value for event in events.Scalars(f"gradients/{name}/norm")}
        assert points == pytest.approx(
            {step: row[name] for step, row in enumerate(norms)}, rel=1e-5
        )
    pictures = events.Histograms("gradients/histogram")
    assert [picture.step for picture in pictures] == [0, 3]
    value = pictures[0].histogram_value
    assert sum(value.bucket) == value.num == 40
    assert value.min == -value.max
    assert [event.step for event in events.Scalars("loss")] == list(range(STEPS))


def points(run_dir: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of a run directory."""
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@pytest.mark.parametrize("start_step", [None, 3, 0])
def test_tensorboard_over_a_resumed_run_shows_each_step_once(
    tmp_path: Path, start_step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are made again replace those of before, as in the record."""
    train(tmp_path, ["tensorboard"])
    # TensorBoard reads files in the order of the seconds in their names.
    later = SimpleNamespace(time=lambda: time.time() + 2)
    monkeypatch.setattr(event_file_writer, "time", later)
    train(tmp_path, ["tensorboard"], start_step=start_step, quiet=True)
    name = "gradients/total_norm"
    recorded = [(step.step, step.total_norm) for step in gradsight.open_run(tmp_path).steps()]
    shown = points(tmp_path, name)
    assert [step for step, _ in shown] == [step for step, _ in recorded]
    assert dict(shown) == pytest.approx(dict(recorded), rel=1e-6)


def test_console(capsys: pytest.CaptureFixture[str]) -> None:
    train(None, "console")
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("step 0: loss=")
    assert "grad_norm=" in first
    assert len(first) <= 80


def test_console_says_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    with gradsight.watch(model, sinks=["console"]) as watched:
        (model(torch.ones(1, 2)) * float("nan")).sum().backward()
        watched.step()
    assert "not finite in bias, weight" in capsys.readouterr().out


class Own:
    """The least a sink must have."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.seen: dict[tuple[str, int], float] = {}
        self.fails_at = fails_at

    def log_scalar(self, name: str, value: float, step: int) -> None:
        if step == self.fails_at:
            raise OSError("the tracker is gone")
        self.seen[name, step] = value


def test_a_sink_of_the_users_own() -> None:
    sink = Own()
    norms = train(None, [sink])
    for step, row in enumerate(norms):
        for name, norm in row.items():
            assert sink.seen[f"gradients/{name}/norm", step] == pytest.approx(norm, rel=1e-5)


def test_a_failing_sink_is_switched_off_and_the_others_go_on(tmp_path: Path) -> None:
    broken, whole = Own(fails_at=2), Own()
    with pytest.warns(
        GradsightWarning,
        match="the sink Own failed and is switched off: OSError: the tracker is gone",
    ):
        train(tmp_path, [broken, whole])
    assert max(step for _, step in broken.seen) == 1
    assert max(step for _, step in whole.seen) == STEPS - 1
    run = gradsight.open_run(tmp_path)
    assert len(list(run.steps())) == STEPS
    (problem,) = run.problems()
    assert problem.key == "sink-Own"


def test_a_sink_gets_each_step_once_and_whole() -> None:
    """Also what is logged after the step: loss, and what a memory monitor samples."""

    class Rows:
        def __init__(self) -> None:
            self.rows: list[tuple[int, dict[str, float]]] = []

        def log_scalar(self, name: str, value: float, step: int) -> None:
            raise AssertionError("many are asked for at once")

        def log_scalars(self, values: dict[str, float], step: int) -> None:
            self.rows.append((step, dict(values)))

    sink = Rows()
    train(None, [sink])
    assert [step for step, _ in sink.rows] == list(range(STEPS))
    for _, row in sink.rows:
        assert {"loss", "accuracy", "lr", "gradients/total_norm", "gradients/0.bias/norm"} <= set(
            row
        )


def test_a_users_own_sink_is_asked_for_nothing_but_the_trackers_methods() -> None:
    class Busy(Own):
        def start(self) -> None:
            raise AssertionError("not ours to call")

        def log_step(self, row: object) -> None:
            raise AssertionError("not ours to call")

    sink = Busy()
    train(None, [sink])
    assert len({step for _, step in sink.seen}) == STEPS


def test_what_a_sink_has_missed_is_counted(tmp_path: Path) -> None:
    class Whole:
        def log_scalar(self, name: str, value: float, step: int) -> None:
            raise AssertionError("many are asked for at once")

        def log_scalars(self, values: dict[str, float], step: int) -> None:
            if step == 2:
                raise OSError("the tracker is gone")

    with pytest.warns(GradsightWarning, match="the sink Whole failed"):
        train(tmp_path, [Whole()])
    (problem,) = gradsight.open_run(tmp_path).problems()
    assert problem.count == STEPS - 2


def test_steps_that_a_slow_sink_cannot_take_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is bounded by how many numbers wait, not by how many steps."""
    monkeypatch.setattr("gradsight.store.sinks.queue._MOST_VALUES", 100)
    go_on = threading.Event()
    seen: list[int] = []

    class Slow:
        def log_scalar(self, name: str, value: float, step: int) -> None:
            raise AssertionError("many are asked for at once")

        def log_scalars(self, values: dict[str, float], step: int) -> None:
            assert go_on.wait(50)
            seen.append(step)

    problems = Problems()
    queue = SinkQueue([Slow()], problems)
    values = {f"value {index}": 1.0 for index in range(10)}
    with pytest.warns(GradsightWarning, match=r"the sinks \(Slow\) are slower than training"):
        for step in range(50):
            queue.write(step, values, {})
    go_on.set()
    queue.close()
    (problem,) = problems.all()
    assert problem.key == "sinks-full"
    assert len(seen) + problem.count == 50
    assert len(seen) <= 12


def test_a_sink_that_hangs_does_not_keep_the_run_from_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradsight.store.sinks.queue._PATIENCE", 0.3)
    go_on = threading.Event()

    class Hangs:
        def log_scalar(self, name: str, value: float, step: int) -> None:
            go_on.wait(50)

    problems = Problems()
    queue = SinkQueue([Hangs()], problems)
    for step in range(5):
        queue.write(step, {"loss": 1.0}, {})
    with pytest.warns(GradsightWarning, match=r"the sinks \(Hangs\) did not take everything"):
        queue.close()
    go_on.set()
    (problem,) = problems.all()
    assert problem.count >= 4


def test_many_parameters_become_blocks() -> None:
    sink = Own()
    train(None, [sink], layers=260, steps=2)
    names = {name for name, _ in sink.seen if name.endswith("/norm")}
    assert names == {f"gradients/{layer}/norm" for layer in range(260)}
    total = sum(sink.seen[name, 1] ** 2 for name in names) ** 0.5
    assert total == pytest.approx(sink.seen["gradients/total_norm", 1], rel=1e-5)


@pytest.mark.parametrize(
    ("detail", "expected"),
    [("blocks", {"gradients/0/norm", "gradients/1/norm"}), ("parameters", None)],
)
def test_detail_can_be_chosen(detail: str, expected: set[str] | None) -> None:
    sink = Own()
    train(None, [sink], sink_detail=detail)
    names = {name for name, _ in sink.seen if name.endswith("/norm")}
    places = ("0", "0.weight", "0.bias", "1", "1.weight", "1.bias")
    assert names == (expected or {f"gradients/{place}/norm" for place in places})


def test_wrong_sinks_are_refused_before_training(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(
        UsageError, match="there is no sink 'wnadb'; there are console, tensorboard, trackio, wandb"
    ):
        gradsight.watch(model, sinks=["wnadb"])
    with pytest.raises(
        UsageError, match=r"a sink needs a method log_scalar\(name, value, step\); object has none"
    ):
        gradsight.watch(model, sinks=[object()])
    with pytest.raises(UsageError, match="sink 'tensorboard' writes files: give a run_dir"):
        gradsight.watch(model, sinks=["tensorboard"])
    with pytest.raises(UsageError, match="sink_detail must be 'parameters' or 'blocks', got 'all'"):
        gradsight.watch(model, sink_detail="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio"])
def test_a_missing_package_comes_with_its_install_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [
        module for module in sys.modules if module == name or module.startswith(f"{name}.")
    ]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        MissingPackage,
        match=rf"The sink '{name}' needs the package '{name}'.*pip install 'gradsight\[{name}\]'",
    ):
        gradsight.watch(nn.Linear(2, 2), run_dir=tmp_path, sinks=[name])
    assert len(list(gradsight.open_run(tmp_path).steps())) == 0


def test_what_lies_outside_the_drawn_range_is_a_number_beside_it(tmp_path: Path) -> None:
    """The same in every tracker: nothing is put into the outermost bins."""
    model = nn.Linear(40, 50, bias=False)
    far = 5
    gradient = 2 * torch.rand(50, 40, generator=torch.Generator().manual_seed(0)) - 1
    gradient[0, :far] = 1000.0
    sinks = ["wandb", "tensorboard"]
    with gradsight.watch(model, run_dir=tmp_path, sinks=sinks) as watched:
        model.weight.grad = gradient
        watched.step()
    (ours,) = runs(tmp_path)
    (row,) = ours.rows.values()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    share = far / gradient.numel()
    assert row["gradients/histogram_outside"] == pytest.approx(share)
    (shown,) = events.Scalars("gradients/histogram_outside")
    assert shown.value == pytest.approx(share)
    drawn = row["gradients/histogram"]
    assert sum(drawn["values"]) == pytest.approx(gradient.numel() - far)
    assert drawn["bins"][-1] < 1000
    assert drawn["values"][-1] == pytest.approx(drawn["values"][-2])
    # TensorBoard takes bins of any width, so its own hold all entries where they are.
    (exact,) = events.Histograms("gradients/histogram")
    assert exact.histogram_value.bucket[-1] == far
    assert exact.histogram_value.bucket_limit[-2:] == [512, 1024]
