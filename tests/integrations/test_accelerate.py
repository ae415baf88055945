"""Loops of the user's own, made with Accelerate."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradsight
from gradsight.errors import UsageError
from gradsight.integrations import accelerate as door
from integrations.tiny import are_equal, truth, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*")

_generator = torch.Generator().manual_seed(0)
X = torch.randn(24, 6, generator=_generator)
Y = torch.randint(0, 3, (24,), generator=_generator)


class Loop:
    """A plain Accelerate script: 12 micro-batches, and what a float64 loop says of its steps."""

    def __init__(self, accumulated: int = 1, **settings: Any) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulated, **settings
        )
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        loader = DataLoader(TensorDataset(X, Y), batch_size=2)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            self.net, optimizer, loader
        )
        self.accumulated = accumulated
        self.done = 0
        self.truths: list[Any] = []

    def loss(self, model: nn.Module, batches: list[Any]) -> Tensor:
        dtype = next(model.parameters()).dtype
        losses = [nn.functional.cross_entropy(model(x.to(dtype)), y) for x, y in batches]
        return torch.stack(losses).sum() / self.accumulated

    def train(self, steps: int, after: Any = None) -> None:
        """So many optimizer steps; `after(n)` is called after each with its number."""
        pending: list[Any] = []
        starts: list[tuple[list[Tensor], list[Any]]] = []
        batches = list(self.loader)
        for _ in range(steps * self.accumulated):
            batch = batches[self.done % len(batches)]
            if not pending:
                starts.append((weights(self.net), pending))
            pending.append(batch)
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.done += 1
            if self.accelerator.sync_gradients:
                pending = []
                if after is not None:
                    after(self.done // self.accumulated - 1)
        self.starts = starts

    def expected(self) -> list[Any]:
        """Of the steps of the last call of `train`."""
        twin = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        found = []
        for before, batches in self.starts:
            with torch.no_grad():
                for parameter, value in zip(twin.parameters(), before, strict=True):
                    parameter.copy_(value)
            found.append(truth(twin, lambda model: self.loss(model, batches)))  # noqa: B023
        return found


def recorded(folder: Path) -> list[Any]:
    return list(gradsight.open_run(folder).steps())


@pytest.mark.parametrize("accumulated", [1, 3])
def test_steps_are_those_of_a_plain_loop(accumulated: int, tmp_path: Path) -> None:
    plain = Loop(accumulated)
    plain.train(4)
    loop = Loop(accumulated)
    with door.watch(loop.accelerator, loop.model, loop.optimizer, run_dir=tmp_path) as watched:
        loop.train(4)
        watched.log(accuracy=0.5)
    assert are_equal(weights(plain.net), weights(loop.net))
    run = gradsight.open_run(tmp_path)
    steps = list(run.steps())
    for step, expected in zip(steps, loop.expected(), strict=True):
        assert step.gradient == "true"
        assert step.loss == pytest.approx(expected.loss, rel=1e-6)
        assert step.total_norm == pytest.approx(expected.norm, rel=1e-5)
        assert step.clip_coef == pytest.approx(min(1.0, 0.5 / expected.norm), rel=1e-4)
        assert step.lr == 1e-2
    assert steps[3].scalars["accuracy"] == 0.5
    names = [each["name"] for each in run.config["parameters"]]
    assert names == [name for name, _ in loop.net.named_parameters()]


def test_load_state_goes_on_at_the_step_that_was_saved(tmp_path: Path) -> None:
    run, saved = tmp_path / "run", tmp_path / "saved"
    loop = Loop()
    watched = door.watch(loop.accelerator, loop.model, loop.optimizer, run_dir=run, quiet=True)
    loop.train(3)
    loop.accelerator.save_state(str(saved))
    loop.train(4)
    assert json.loads((saved / "gradsight.json").read_text())["step"] == 3
    before = recorded_open(watched, run)
    loop.accelerator.load_state(str(saved))
    loop.done = 3
    loop.train(4)
    watched.log(last=1.0)
    watched.close()
    after = recorded(run)
    assert [step.step for step in after] == list(range(7)) == [step.step for step in before]
    assert [step.loss for step in after] == pytest.approx([step.loss for step in before], rel=1e-6)
    assert all(new.time > old.time for new, old in zip(after[3:], before[3:], strict=True))
    assert after[6].scalars["last"] == 1.0


def recorded_open(watched: Any, folder: Path) -> list[Any]:
    """The steps of a run whose watch is open."""
    watched.finish_steps(on_disk=True)
    return recorded(folder)


@pytest.mark.parametrize("first", ["watch", "load"])
def test_another_process_may_load_before_or_after_it_watches(first: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    names = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    loop = Loop(project_config=names)
    with door.watch(loop.accelerator, loop.model, loop.optimizer, run_dir=run):
        loop.train(2)
        loop.accelerator.save_state()
        loop.train(5)
    again = Loop(project_config=names)
    if first == "load":
        again.accelerator.load_state()
    with door.watch(again.accelerator, again.model, again.optimizer, run_dir=run, quiet=True):
        if first == "watch":
            again.accelerator.load_state()
        again.done = 2
        again.train(2)
    assert [step.step for step in recorded(run)] == [0, 1, 2, 3]
    # What was loaded then says nothing of a watch that is opened later.
    with door.watch(again.accelerator, again.model, again.optimizer, run_dir=run, quiet=True):
        again.train(1)
    assert [step.step for step in recorded(run)] == [0, 1, 2, 3, 4]


def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    without = Loop()
    without.train(2)
    without.accelerator.save_state(str(tmp_path / "without"))
    loop = Loop()
    run = tmp_path / "run"
    with door.watch(loop.accelerator, loop.model, loop.optimizer, run_dir=run, quiet=True):
        loop.train(1)
        loop.accelerator.load_state(str(tmp_path / "without"))
        loop.train(2)
        loop.accelerator.save_state(str(tmp_path / "with"))
    # It does not say at which step it was saved: the count goes on.
    assert [step.step for step in recorded(run)] == [0, 1, 2]
    plain = Loop()
    plain.accelerator.load_state(str(tmp_path / "with"))
    assert are_equal(weights(plain.net), weights(loop.net))


def test_two_watches_of_one_accelerator(tmp_path: Path) -> None:
    """As in a GAN: each has its own steps, and hears only the losses of its own model."""
    loop = Loop()
    other = nn.Linear(6, 1)
    model, optimizer = loop.accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    first = door.watch(loop.accelerator, loop.model, loop.optimizer, run_dir=tmp_path / "a")
    second = door.watch(loop.accelerator, model, optimizer, run_dir=tmp_path / "b")

    def train_the_other(_: int) -> None:
        loop.accelerator.backward(model(X).square().mean() + 100)
        optimizer.step()
        optimizer.zero_grad()

    loop.train(2, after=train_the_other)
    train_the_other(2)
    loop.accelerator.save_state(str(tmp_path / "saved"))
    loop.train(1)
    loop.accelerator.load_state(str(tmp_path / "saved"))
    train_the_other(3)
    first.close()
    second.close()
    assert [step.step for step in recorded(tmp_path / "a")] == [0, 1]
    assert [step.step for step in recorded(tmp_path / "b")] == [0, 1, 2, 3]
    assert all(step.loss < 10 for step in recorded(tmp_path / "a"))
    assert all(step.loss > 100 for step in recorded(tmp_path / "b"))


class Rows(GeneralTracker):  # type: ignore[misc]
    """A tracker of the user's."""

    name = "rows"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def tracker(self) -> Any:
        return self.rows

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        self.rows.append((step, dict(values)))


def test_trackers_are_sinks(tmp_path: Path) -> None:
    tracker = Rows()
    loop = Loop(log_with=tracker)
    with door.watch(loop.accelerator, loop.model, loop.optimizer, run_dir=tmp_path):
        loop.accelerator.init_trackers("mine")
        loop.train(3, after=lambda step: loop.accelerator.log({"mine": 1.0}, step=step))
    ours = [(step, row) for step, row in tracker.rows if "gradients/total_norm" in row]
    assert [step for step, _ in ours] == [0, 1, 2]
    for (_, row), step in zip(ours, recorded(tmp_path), strict=True):
        assert row["gradients/total_norm"] == step.total_norm
        assert row["gradsight/loss"] == step.loss
    assert [row for _, row in tracker.rows if "mine" in row] == [{"mine": 1.0}] * 3


@pytest.mark.parametrize("count", ["step", "steps made", "none"])
@pytest.mark.parametrize("opened_by", ["door", "watch"])
def test_what_is_logged_lands_in_the_steps(
    count: str, opened_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(LOGGER_TYPE_TO_CLASS, "gradsight", raising=False)
    door.register()
    loop = Loop(log_with="gradsight")
    loop.accelerator.init_trackers("mine")
    watched: Any
    if opened_by == "door":
        watched = door.watch(loop.accelerator, loop.model, loop.optimizer, run_dir=tmp_path)
    else:
        watched = gradsight.watch(loop.model, loop.optimizer, run_dir=tmp_path)

    def log(step: int) -> None:
        number = {"step": step, "steps made": step + 1, "none": None}[count]
        values = {"accuracy": step / 10, "loss": torch.tensor(7.0), "note": "words"}
        loop.accelerator.log(values, step=number)

    with watched:
        loop.train(3, after=log)
    steps = recorded(tmp_path)
    assert [step.scalars["accuracy"] for step in steps] == [0.0, 0.1, 0.2]
    assert [step.scalars["loss"] for step in steps] == [7.0] * 3
    if opened_by == "door":
        assert all(step.loss < 2 for step in steps)


def test_an_exception_leaves_a_record(tmp_path: Path) -> None:
    loop = Loop()

    def fail(step: int) -> None:
        if step == 2:
            raise KeyError("mine")

    with (
        pytest.raises(KeyError, match="mine"),
        door.watch(loop.accelerator, loop.model, loop.optimizer, run_dir=tmp_path),
    ):
        loop.train(5, after=fail)
    assert [step.step for step in recorded(tmp_path)] == [0, 1, 2]


def test_a_finding_stops_the_loop(tmp_path: Path) -> None:
    loop = Loop()

    def break_it(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                loop.net[0].weight.fill_(float("nan"))

    with (
        pytest.raises(gradsight.StopTraining),
        door.watch(
            loop.accelerator,
            loop.model,
            loop.optimizer,
            run_dir=tmp_path,
            quiet=True,
            on_finding={"critical": "stop"},
        ),
    ):
        loop.train(9, after=break_it)
    assert [step.step for step in recorded(tmp_path)] == [0, 1, 2, 3]


class Engine(nn.Module):
    """Of the same shape as what Accelerate's `prepare` returns under DeepSpeed."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("why", ["unseen", "switched off"])
def test_unwatched_it_still_takes_everything(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop()
    model = loop.model
    if why == "unseen":
        model = Engine(model)
    else:
        monkeypatch.setenv("GRADSIGHT", "0")
    with door.watch(loop.accelerator, model, loop.optimizer, run_dir=tmp_path / "run") as watched:
        loop.train(2)
        watched.log(loss=1.0)
        watched.ids([1])
        watched.step(1)
        loop.accelerator.save_state(str(tmp_path / "saved"))
        loop.accelerator.load_state(str(tmp_path / "saved"))
    watched.close()
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "saved" / "gradsight.json").exists()
    said = capsys.readouterr().err
    assert ("not watched: DeepSpeed" in said) == (why == "unseen")


def test_wrong_usage() -> None:
    loop = Loop()
    with pytest.raises(UsageError, match="accelerator must be an Accelerator, got Sequential"):
        door.watch(loop.net, loop.model, loop.optimizer)
    with pytest.raises(UsageError, match="there is no option 'sink'"):
        door.watch(loop.accelerator, loop.model, loop.optimizer, sink=[])
