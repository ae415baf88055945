"""A second engine on a run directory goes on where the first one ended, or where it is told to."""

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import torch

import gradsight
import warm
from ghost.small import SmallGPT, loss_fn, pair, small
from gradsight import GhostEngine, GradsightError, open_run, read_scores
from gradsight.errors import GradsightWarning
from gradsight.store import score_folder


class Training:
    """A model and its optimizer, which can be stopped and taken up again as a checkpoint is."""

    def __init__(self) -> None:
        self.model: SmallGPT = small()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.step = 0

    def resumed(self) -> "Training":
        other = Training()
        other.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        other.step = self.step
        return other

    def engine(self, run_dir: Path | None, **options: object) -> GhostEngine:
        targets = {"a": pair(3, 2), "b": pair(2, 3)}
        options = {"save_interval": 10, "optimizer": self.optimizer, **options}
        return GhostEngine(self.model, loss_fn, targets=targets, run_dir=run_dir, **options)

    def run(self, engine: GhostEngine, steps: int, **told: object) -> None:
        for _ in range(steps):
            for part in range(2):
                with engine.observe(**told):
                    (loss_fn(self.model, pair(2, 100 * self.step + part)) / 2).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + self.step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1


def steps_in(run_dir: Path) -> list[int]:
    """The step of every row, as a run's reader gives them."""
    return read_scores(run_dir)["step"].to_pylist()


def rows_of(steps: int, first: int = 0) -> list[int]:
    """What `steps_in` gives for steps of two micro-batches of two samples and two targets."""
    return [step for step in range(first, first + steps) for _ in range(2 * 2 * 2)]


def names_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "grad_dotprods").iterdir())


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"per_parameter": True, "precondition": "adam"}, marks=pytest.mark.slow)],
)
def test_a_resumed_run_saves_what_one_run_would(tmp_path: Path, options: dict[str, object]) -> None:
    straight = Training()
    engine = straight.engine(tmp_path / "straight", **options)
    straight.run(engine, 20)
    engine.close()
    training = Training()
    for steps in (12, 8):
        engine = training.engine(tmp_path / "resumed", **options)
        training.run(engine, steps)
        engine.close()
        training = training.resumed()
    assert names_in(tmp_path / "resumed") == ["iter_000010.parquet", "iter_000020.parquet"]
    assert steps_in(tmp_path / "resumed") == rows_of(20)
    for file in sorted((tmp_path / "straight" / "grad_dotprods").iterdir()):
        other = tmp_path / "resumed" / "grad_dotprods" / file.name
        # Every column, bit for bit: scores, running sample numbers, learning rate, clipping.
        assert pyarrow.parquet.read_table(file).equals(
            pyarrow.parquet.read_table(other), check_metadata=True
        )
    ids = pyarrow.parquet.read_table(
        tmp_path / "resumed" / "grad_dotprods" / "iter_000020.parquet"
    )["sample_id"]
    assert (min(ids.to_pylist()), max(ids.to_pylist())) == (40, 79)


def test_steps_from_start_step_on_are_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training()
    engine = training.engine(tmp_path)
    training.run(engine, 12)
    engine.close()
    before = read_scores(tmp_path)
    training = training.resumed()
    engine = training.engine(tmp_path, start_step=5)
    assert steps_in(tmp_path) == rows_of(12)  # nothing is taken away before there is something new
    assert capsys.readouterr().err == ""
    training.run(engine, 1)
    said = f"gradsight: continuing the scores of {tmp_path}: steps 5 to 11 are replaced\n"
    assert capsys.readouterr().err == said
    assert steps_in(tmp_path) == rows_of(5)
    assert names_in(tmp_path) == ["iter_000005.parquet"]
    training.run(engine, 3)
    engine.close()
    assert steps_in(tmp_path) == rows_of(9)
    assert names_in(tmp_path) == ["iter_000009.parquet"]
    after = read_scores(tmp_path)
    assert after.slice(0, len(rows_of(5))).equals(before.slice(0, len(rows_of(5))))
    engine = training.engine(tmp_path)
    training.run(engine, 2)
    engine.close()
    said = f"gradsight: continuing the scores of {tmp_path} after step 8\n"
    assert capsys.readouterr().err == said
    assert names_in(tmp_path) == ["iter_000010.parquet", "iter_000011.parquet"]
    assert steps_in(tmp_path) == rows_of(11)


def test_a_model_that_is_refused_takes_nothing_away(tmp_path: Path) -> None:
    training = Training()
    engine = training.engine(tmp_path)
    training.run(engine, 3)
    engine.close()
    engine = training.engine(tmp_path, start_step=0)
    with pytest.raises(GradsightError, match="without a backward pass"), engine.observe():
        loss_fn(training.model, pair(2, 1))
    engine.close()
    assert steps_in(tmp_path) == rows_of(3)


def test_steps_that_the_user_gives(tmp_path: Path) -> None:
    training = Training()
    engine = training.engine(tmp_path)
    training.run(engine, 1, step=100)
    training.run(engine, 1)  # counted on from there
    training.run(engine, 1, step=200)
    with (
        pytest.raises(
            GradsightError,
            match=r"steps only go forward: step 7 after step 200\. To score steps again, close "
            r"this engine and make one with GhostEngine\(\.\.\., start_step=7\)",
        ),
        engine.observe(step=7),
    ):
        pass
    engine.close()
    assert steps_in(tmp_path) == [step for step in (100, 101, 200) for _ in range(8)]
    engine = training.engine(tmp_path)
    training.run(engine, 1, step=101)
    engine.close()
    assert steps_in(tmp_path) == [step for step in (100, 101) for _ in range(8)]
    engine = training.engine(tmp_path, start_step=12)
    with (
        pytest.raises(GradsightError, match=r"observe\(step=3\) lies before start_step=12"),
        engine.observe(step=3),
    ):
        pass


def test_steps_without_observation_count(tmp_path: Path) -> None:
    training = Training()
    for _ in range(2):
        engine = training.engine(tmp_path)
        for _ in range(3):
            training.optimizer.step()
        training.run(engine, 1)
        engine.close()
    assert sorted(set(steps_in(tmp_path))) == [3, 7]


def test_without_an_optimizer_blocks_are_counted_on(tmp_path: Path) -> None:
    training = Training()
    for _ in range(2):
        engine = training.engine(tmp_path, optimizer=None)
        training.run(engine, 2)
        engine.close()
    assert sorted(set(steps_in(tmp_path))) == list(range(8))


@pytest.mark.parametrize("engine_first", [True, False])
def test_under_a_watch_steps_are_the_watchs(tmp_path: Path, engine_first: bool) -> None:
    training = Training()
    for start_step in (None, None, 5):
        early = None
        if engine_first:
            early = training.engine(tmp_path)
        with gradsight.watch(
            training.model, training.optimizer, run_dir=tmp_path, start_step=start_step
        ):
            engine = early or training.engine(tmp_path)
            training.run(engine, 4)
        engine.close()
    run = open_run(tmp_path)
    assert [step.step for step in run.steps()] == list(range(9))
    assert [score.step for score in run.scores()] == rows_of(9)


def test_a_watch_counts_on_after_scores(tmp_path: Path) -> None:
    """Where an earlier run was scored but not watched, both go on after its scores."""
    training = Training()
    engine = training.engine(tmp_path)
    training.run(engine, 4)
    engine.close()
    with gradsight.watch(training.model, training.optimizer, run_dir=tmp_path):
        engine = training.engine(tmp_path)
        training.run(engine, 2)
        engine.close()
    run = open_run(tmp_path)
    assert [step.step for step in run.steps()] == [4, 5]
    assert [score.step for score in run.scores()] == rows_of(6)


def test_an_engine_goes_on_after_the_record(tmp_path: Path) -> None:
    """A killed run has recorded more steps than it has saved scores of."""
    training = Training()
    with gradsight.watch(training.model, training.optimizer, run_dir=tmp_path):
        engine = training.engine(tmp_path)
        training.run(engine, 3)
        engine.close()
        training.optimizer.step()
    engine = training.engine(tmp_path)
    training.run(engine, 1)
    engine.close()
    assert sorted(set(steps_in(tmp_path))) == [0, 1, 2, 4]


def test_steps_that_are_not_the_watchs_are_refused(tmp_path: Path) -> None:
    training = Training()
    with gradsight.watch(training.model, training.optimizer, run_dir=tmp_path, start_step=7):
        engine = training.engine(tmp_path)
        with (
            pytest.raises(
                GradsightError,
                match=r"observe\(step=3\), but the watch on .* is at step 7: .*"
                r"gradsight\.watch\(\.\.\., start_step=3\)",
            ),
            engine.observe(step=3),
        ):
            pass
        engine.close()
        engine = training.engine(tmp_path, start_step=2)
        with (
            pytest.raises(
                GradsightError,
                match=r"start_step=2, but the watch on .* began with step 7 and is at step 7",
            ),
            engine.observe(),
        ):
            pass
        engine.close()
        engine = training.engine(tmp_path, start_step=7)
        training.run(engine, 1, step=7)
        training.run(engine, 1)
        engine.close()
    assert sorted(set(steps_in(tmp_path))) == [7, 8]


def test_steps_counted_by_hand(tmp_path: Path) -> None:
    training = Training()
    with gradsight.watch(training.model, run_dir=tmp_path) as watched:
        engine = training.engine(tmp_path, optimizer=None)
        for step in (10, 10, 20):
            with engine.observe(step=step):
                loss_fn(training.model, pair(2, 1)).backward()
            if step != engine.scores.step:
                raise AssertionError
        watched.step(step=20)
        with engine.observe():
            loss_fn(training.model, pair(2, 1)).backward()
        engine.close()
    assert sorted(set(steps_in(tmp_path))) == [10, 20, 21]


def test_a_step_that_a_scaler_leaves_out_is_a_step(tmp_path: Path) -> None:
    """So that the next batch's scores are not mixed with it, and a watch counts alike."""
    model = small(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    engine = GhostEngine(model, loss_fn, pair(3, 2), optimizer=optimizer, run_dir=tmp_path)
    for step in range(4):
        with engine.observe():
            scaler.scale(loss_fn(model, pair(2, step))).backward()
        if step == 1:
            model.embed.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    engine.close()
    assert steps_in(tmp_path) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_files_of_strangers_and_damaged_ones_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "grad_dotprods"
    folder.mkdir()
    foreign = pyarrow.table({"step": ["one"], "target": ["a"]})
    pyarrow.parquet.write_table(foreign, folder / "iter_000004.parquet")
    (folder / "iter_000006.parquet").write_bytes(b"cut off")
    (folder / "iter_last.parquet").write_bytes(b"not ours")
    training = Training()
    engine = training.engine(tmp_path)
    training.run(engine, 2)
    engine.close()
    written = pyarrow.parquet.read_table(folder / "iter_000008.parquet")
    assert set(written["step"].to_pylist()) == {6, 7}
    assert (folder / "iter_000006.parquet").read_bytes() == b"cut off"
    with pytest.raises(GradsightError, match=r"iter_last\.parquet cannot be read"):
        steps_in(tmp_path)


def test_one_engine_at_a_time(tmp_path: Path) -> None:
    training = Training()
    engine = training.engine(tmp_path)
    training.run(engine, 1)
    second = training.engine(tmp_path)
    with (
        pytest.raises(
            GradsightError,
            match=r"another GhostEngine, of this process or of another, writes scores into .*: "
            r"close\(\) it first",
        ),
        second.observe(),
    ):
        pass
    second.close()
    training.run(engine, 1)
    engine.close()
    third = training.engine(tmp_path)
    training.run(third, 1)
    third.close()
    assert steps_in(tmp_path) == rows_of(3)


KILLED = """
import os, signal, sys
from pathlib import Path
from ghost.test_resume import Training
training = Training()
engine = training.engine(Path(sys.argv[1]), save_interval=2)
training.run(engine, 5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def ended(script: str, run_dir: Path) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return warm.run(["-c", script, run_dir], env=environment)


def test_an_engine_that_nobody_closes_is_closed_at_the_end(tmp_path: Path) -> None:
    assert ended(KILLED.replace("os.kill", "#"), tmp_path).returncode == 0
    assert steps_in(tmp_path) == rows_of(5)


def test_steps_of_which_none_is_observed_are_said(tmp_path: Path) -> None:
    training = Training()
    engine = training.engine(tmp_path)
    training.optimizer.step()
    training.optimizer.step()
    with pytest.warns(GradsightWarning, match="made 2 steps and no sample was scored: put every"):
        engine.close()
    (problem,) = open_run(tmp_path).problems()
    assert problem.key == "nothing observed"


def test_a_killed_run_is_gone_on_with(tmp_path: Path) -> None:
    killed = ended(KILLED, tmp_path)
    assert killed.returncode == -signal.SIGKILL
    assert steps_in(tmp_path) == rows_of(4)  # the fifth was not yet due
    training = Training()
    engine = training.engine(tmp_path, save_interval=2)
    training.run(engine, 3)
    engine.close()
    assert steps_in(tmp_path) == rows_of(7)


@pytest.mark.parametrize("start_step", [None, 3])
def test_a_kill_between_two_files_leaves_each_step_once(
    tmp_path: Path, start_step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    engine = training.engine(tmp_path, save_interval=4)
    training.run(engine, 6)
    engine.close()
    whole = read_scores(tmp_path)

    class Killed(BaseException):
        pass

    def killed(path: Path) -> None:
        raise Killed

    engine = training.engine(tmp_path, save_interval=4, start_step=start_step)
    with monkeypatch.context() as patch:
        patch.setattr(score_folder.Path, "unlink", killed)
        with pytest.raises(Killed):
            training.run(engine, 2)
    engine._log._folder.close()  # as the end of the process does
    steps = steps_in(tmp_path)
    assert steps == rows_of(8 if start_step is None else 6)
    table = read_scores(tmp_path)
    assert table.slice(0, len(rows_of(3))).equals(whole.slice(0, len(rows_of(3))))
    training = training.resumed()
    engine = training.engine(tmp_path, save_interval=4, start_step=start_step)
    training.run(engine, 2)
    engine.close()
    assert steps_in(tmp_path) == rows_of(10 if start_step is None else 5)
