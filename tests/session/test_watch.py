"""A watch from opening to closing: steps, logs, resuming, ends of all kinds, and bad input."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import warm
from gradsight import Schedule, open_run, watch
from gradsight.errors import GradsightWarning, RunError, UsageError
from gradsight.measure import norms


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def backward(model: nn.Module) -> torch.Tensor:
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    return loss


def train(run_dir: Path | None, steps: int, **options: Any) -> nn.Module:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, run_dir=run_dir, **options) as watched:
        for _ in range(steps):
            loss = backward(model)
            optimizer.step()
            optimizer.zero_grad()
            watched.log(loss=loss)
    return model


# Steps and logs.


@pytest.mark.parametrize(
    "when", ["before backward", "after backward", "after step", "after zero_grad"]
)
def test_a_log_belongs_to_its_own_step_wherever_it_stands(when: str, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = {}
    with watch(model, optimizer, run_dir=tmp_path) as watched:
        for step in range(8):
            loss = model(torch.randn(8, 4)).square().mean()

            def log(at: str, loss: torch.Tensor = loss, step: int = step) -> None:
                if at == when and step % 3 != 1:  # not at every step: a loop may log rarely
                    losses[step] = loss.item()
                    watched.log(loss=loss.item(), extra=step)

            log("before backward")
            loss.backward()
            log("after backward")
            optimizer.step()
            log("after step")
            optimizer.zero_grad()
            log("after zero_grad")
    steps = list(open_run(tmp_path).steps())
    assert {step.step: step.loss for step in steps if step.loss is not None} == pytest.approx(
        losses
    )
    assert all(
        step.scalars.get("extra") == (step.step if step.step in losses else None) for step in steps
    )


def test_evaluation_between_steps_begins_no_step(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, run_dir=tmp_path) as watched:
        backward(model)
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(2, 4))
        watched.log(val_loss=3.0)
    (step,) = open_run(tmp_path).steps()
    assert step.scalars["val_loss"] == 3.0


def test_schedules_decide_what_is_recorded(tmp_path: Path) -> None:
    train(
        tmp_path,
        10,
        stats=Schedule(start_step=2, end_step=8, step_interval=3),
        histograms=Schedule(step_interval=4),
    )
    run = open_run(tmp_path)
    assert [step.step for step in run.steps()] == list(range(10))
    assert {stat.step for stat in run.parameter_stats()} == {2, 5, 8}
    assert {histogram.step for histogram in run.histograms()} == {0, 4, 8}
    assert [step.step for step in run.steps() if step.total_norm is not None] == [2, 5, 8]
    assert all(step.loss is not None for step in run.steps())


def test_the_config_says_what_ran(tmp_path: Path) -> None:
    train(tmp_path, 1)
    config = open_run(tmp_path).config
    assert (
        config["gradient"]
        == "accumulated over micro-batches, reduced over ranks, unscaled, before clipping"
    )
    assert config["versions"]["torch"] == torch.__version__
    assert [(parameter["name"], parameter["shape"]) for parameter in config["parameters"]] == [
        ("0.weight", [4, 4]),
        ("0.bias", [4]),
        ("2.weight", [2, 4]),
        ("2.bias", [2]),
    ]
    assert config["world_size"] == 1


def test_nothing_on_disk_without_a_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(None, 3)
    assert not list(tmp_path.iterdir())


def test_a_bad_step_counts_what_is_bad(tmp_path: Path) -> None:
    model = net()
    with watch(model, run_dir=tmp_path) as watched:
        backward(model)
        model[0].weight.grad[0, :3] = math.nan
        model[2].bias.grad[1] = math.inf
        model[2].weight.grad.fill_(1e30)
        watched.step()
        model.zero_grad()
        backward(model)
        watched.step()
    first, second = open_run(tmp_path).steps()
    stats = {(stat.step, stat.parameter): stat for stat in open_run(tmp_path).parameter_stats()}
    assert math.isnan(first.total_norm or 0)
    assert (stats[0, "0.weight"].nan, stats[0, "0.weight"].inf) == (3, 0)
    assert (stats[0, "2.bias"].nan, stats[0, "2.bias"].inf) == (0, 1)
    assert stats[0, "2.bias"].l2 == math.inf
    assert (stats[0, "2.weight"].nan, stats[0, "2.weight"].inf) == (0, 0)
    assert stats[0, "2.weight"].l2 == pytest.approx(1e30 * math.sqrt(8), rel=1e-6)
    assert math.isfinite(second.total_norm or math.nan)


def test_parameters_thawed_on_the_way_are_seen(tmp_path: Path) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, run_dir=tmp_path):
        for step in range(4):
            model[0].requires_grad_(step >= 2)
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
    seen = {(stat.step, stat.parameter) for stat in open_run(tmp_path).parameter_stats()}
    assert {step for step, name in seen if name == "0.weight"} == {2, 3}
    assert {step for step, name in seen if name == "2.weight"} == {0, 1, 2, 3}


# Resuming.


def test_resuming_goes_on_after_the_last_step(tmp_path: Path) -> None:
    train(tmp_path, 5)
    train(tmp_path, 3)
    assert [step.step for step in open_run(tmp_path).steps()] == list(range(8))


def test_steps_that_are_run_again_replace_the_old_ones(tmp_path: Path) -> None:
    train(tmp_path, 10)
    before = {step.step: step.time for step in open_run(tmp_path).steps()}
    train(tmp_path, 2, start_step=4)
    after = {step.step: step.time for step in open_run(tmp_path).steps()}
    assert sorted(after) == list(range(6))
    assert all(after[step] == before[step] for step in range(4))
    assert all(after[step] > before[9] for step in (4, 5))


def test_a_run_may_start_later(tmp_path: Path) -> None:
    train(tmp_path, 2, start_step=100)
    assert [step.step for step in open_run(tmp_path).steps()] == [100, 101]


def test_own_step_numbers_only_go_forward(tmp_path: Path) -> None:
    model = net()
    with watch(model, run_dir=tmp_path) as watched:
        backward(model)
        watched.step(step=7, loss=1.0)
        backward(model)
        with pytest.raises(
            UsageError, match=r"steps only go forward: step 3 after step 7\. .* start_step=3"
        ):
            watched.step(step=3)
        watched.step()
    assert [step.step for step in open_run(tmp_path).steps()] == [7, 8]


def test_a_scaled_loss_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    """Its scaler never stepped: NaN gradients of the next run are no overflow of a scaled loss."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watch(model, optimizer, quiet=True):
        scaler.scale(model(torch.randn(3, 4)).mean()).backward()
    optimizer.zero_grad()
    with watch(model, optimizer, run_dir=tmp_path, quiet=True):
        (model(torch.randn(3, 4)) * 0).sqrt().mean().backward()
        optimizer.step()
    (incident,) = open_run(tmp_path).incidents()
    assert incident.diagnosis is not None


# Ends of all kinds.


def state_of_the_world(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    scaler = torch.amp.GradScaler
    return (
        torch.autograd.backward,
        scaler.scale,
        scaler.unscale_,
        scaler.step,
        signal.getsignal(signal.SIGTERM),
        dict(optimizer._optimizer_step_pre_hooks),
        dict(optimizer._optimizer_step_post_hooks),
        [(dict(module._forward_hooks), dict(module._backward_hooks)) for module in model.modules()],
        [parameter._backward_hooks for parameter in model.parameters()],
        torch.random.get_rng_state().tolist(),
    )


def test_everything_is_left_as_it_was_found(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = state_of_the_world(model, optimizer)
    watched = watch(model, optimizer, run_dir=tmp_path)
    assert state_of_the_world(model, optimizer) != before
    watched.close()
    watched.close()
    assert state_of_the_world(model, optimizer) == before
    with pytest.raises(ZeroDivisionError), watch(model, optimizer, run_dir=tmp_path):
        _ = 1 / 0
    assert state_of_the_world(model, optimizer) == before


def test_two_watches_leave_in_any_order(tmp_path: Path) -> None:
    first, second = net(), net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    before = state_of_the_world(first, optimizers[0])
    one = watch(first, optimizers[0], run_dir=tmp_path / "a")
    two = watch(second, optimizers[1], run_dir=tmp_path / "b")
    backward(first)
    optimizers[0].step()
    one.close()
    backward(second)
    optimizers[1].step()
    two.close()
    assert [len(list(open_run(tmp_path / name).steps())) for name in "ab"] == [1, 1]
    after = state_of_the_world(first, optimizers[0])
    assert after[:4] == before[:4]


SCRIPT = """
import os, signal, sys, time, torch
from torch import nn
import gradsight
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watched = gradsight.watch(model, optimizer, run_dir=sys.argv[1])
for step in range(5):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
{ending}
"""


def run_script(text: str, run_dir: Path) -> subprocess.CompletedProcess[str]:
    return warm.run(["-c", text, run_dir], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("raise RuntimeError('mine')", 1),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", -signal.SIGTERM),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_however_a_process_ends_its_steps_are_there(ending: str, code: int, tmp_path: Path) -> None:
    if ending:
        done = run_script(SCRIPT.format(ending=ending), tmp_path)
    else:  # through the end of a real interpreter
        command = [sys.executable, "-c", SCRIPT.format(ending=""), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert [step.step for step in open_run(tmp_path).steps()] == list(range(5))


@pytest.mark.parametrize("attempt", range(4))
def test_sigterm_in_the_middle_of_anything(attempt: int, tmp_path: Path) -> None:
    """Every step that was made is on the disk, and the process ends as asked."""
    script = (
        SCRIPT.format(ending="")
        .replace("range(5)", "range(10**9)")
        .replace("optimizer.step()", "optimizer.step(); print(step, flush=True)")
    )
    with warm.Popen(["-c", script, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = [process.stdout.readline() for _ in range(20 + 7 * attempt)]
        process.send_signal(signal.SIGTERM)
        last = int((printed + process.stdout.read().split())[-1])
        assert process.wait(200) == -signal.SIGTERM
    steps = [step.step for step in open_run(tmp_path).steps()]
    assert steps == list(range(len(steps)))
    assert len(steps) >= last


def test_a_sigterm_handler_of_the_users_is_called(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGTERM, lambda *_: (print('mine'), sys.exit(5)))\n"
    ending = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"
    text = SCRIPT.format(ending=ending).replace("model = nn", script + "model = nn")
    done = run_script(text, tmp_path)
    assert (done.returncode, done.stdout.strip()) == (5, "mine"), done.stderr
    assert len(list(open_run(tmp_path).steps())) == 5


def test_data_loader_workers_and_forks_do_not_touch_the_run(tmp_path: Path) -> None:
    ending = """
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8, num_workers=2)
for batch in loader:
    model(batch).square().mean().backward()
    optimizer.step()
"""
    done = run_script(SCRIPT.format(ending=ending), tmp_path)
    assert done.returncode == 0, done.stderr
    assert [step.step for step in open_run(tmp_path).steps()] == list(range(13))


# Faults of ours never stop training.


def test_a_fault_of_ours_is_said_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [parameter.detach().clone() for parameter in _seeded(train, None, 6).parameters()]
    look = norms.NormReading.read

    def fails_at_the_third(self: norms.NormReading) -> norms.Norms:
        fails_at_the_third.count += 1  # type: ignore[attr-defined]
        if fails_at_the_third.count == 3:  # type: ignore[attr-defined]
            raise RuntimeError("a bug of ours")
        return look(self)

    fails_at_the_third.count = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(norms.NormReading, "read", fails_at_the_third)
    with pytest.warns(
        GradsightWarning,
        match="Gradsight stopped looking at gradients: RuntimeError: a bug of ours",
    ) as warned:
        model = _seeded(train, tmp_path, 6)
    assert len(warned) == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))
    run = open_run(tmp_path)
    assert len(list(run.steps())) == 2
    (problem,) = run.problems()
    assert (problem.key, problem.first_step) == ("capture", 1)


def _seeded(train: Any, run_dir: Path | None, steps: int) -> nn.Module:
    torch.manual_seed(5)
    return train(run_dir, steps)


def test_warnings_turned_into_errors_do_not_stop_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with watch(model, optimizer, run_dir=tmp_path):
            optimizer.step()
    assert "no parameter of the model has a gradient" in capsys.readouterr().err


# Bad input.


def test_run_dir_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(RunError, match=r"run_dir .*file is a file; give a directory"):
        watch(net(), run_dir=file)
    assert file.read_text() == "mine"


def test_run_dir_is_not_writable(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run_dir /proc/gradsight cannot be made|not writable"):
        watch(net(), run_dir="/proc/gradsight")


def test_a_run_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").write_text("something else entirely" * 100)
    with pytest.raises(
        RunError, match=r"run.sqlite cannot be opened: .*Move it away to start this run anew"
    ):
        watch(net(), run_dir=tmp_path)


def test_one_run_dir_for_two_watches(tmp_path: Path) -> None:
    with (
        watch(net(), run_dir=tmp_path),
        pytest.raises(UsageError, match=r"already recording steps into .* own run_dir"),
    ):
        watch(net(), run_dir=tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ReLU(), "ReLU has nothing to watch: no parameters"),
        (
            nn.Linear(2, 2).requires_grad_(False),
            "Linear has nothing to watch: 2 parameters, all of them frozen",
        ),
        ("model", "model must be a torch.nn.Module, got str"),
    ],
)
def test_nothing_to_watch(model: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        watch(model)


@pytest.mark.parametrize("optimizer", ["adam", 3, [nn.Linear(2, 2)]])
def test_an_optimizer_that_is_none(optimizer: Any) -> None:
    with pytest.raises(
        UsageError, match="optimizer must be a torch optimizer or a sequence of them, got"
    ):
        watch(net(), optimizer)


def test_a_step_without_gradients_says_so(tmp_path: Path) -> None:
    model = net()
    with (
        watch(model, run_dir=tmp_path) as watched,
        pytest.warns(GradsightWarning, match="no parameter of the model has a gradient"),
    ):
        watched.step()
    (step,) = open_run(tmp_path).steps()
    assert (step.gradient, step.total_norm) == ("none seen", None)


def test_step_beside_a_watched_optimizer_only_logs(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, run_dir=tmp_path) as watched:
        with pytest.warns(GradsightWarning, match="its steps are counted already") as warned:
            for _ in range(3):
                backward(model)
                optimizer.step()
                watched.step(loss=1.0)
        assert len(warned) == 1
    assert [step.loss for step in open_run(tmp_path).steps()] == [1.0] * 3


def test_a_log_that_is_no_number() -> None:
    with watch(net()) as watched:
        with pytest.raises(
            UsageError, match=r"loss must be a single number, got a tensor of shape \(3,\)"
        ):
            watched.log(loss=torch.ones(3))
        with pytest.raises(UsageError, match="loss must be a single number, got str"):
            watched.log(loss="low")


def test_names_with_any_character(tmp_path: Path) -> None:
    model = nn.Module()
    names = [
        "weiß",
        "a b",
        "x/y",
        "..",
        "\u2603" * 50,
        "new\nline",
        "q'uote\"",
        "lone\ud800surrogate",
    ]
    for name in names:
        model._parameters[name] = nn.Parameter(torch.ones(2))
    with watch(model, run_dir=tmp_path) as watched:
        sum(parameter.sum() for parameter in model.parameters()).backward()
        watched.step()
    assert [stat.parameter for stat in open_run(tmp_path).parameter_stats()] == names


def test_memory_is_flat_over_a_thousand_steps() -> None:
    import gc

    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, histograms=Schedule(step_interval=10)):
        sizes = []
        for step in range(1000):
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (100, 999):
                gc.collect()
                sizes.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    assert sizes[1] <= sizes[0] + 5


def test_gradients_are_not_kept_alive() -> None:
    import weakref

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        backward(model)
        kept = [weakref.ref(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert all(reference() is None for reference in kept)


def test_the_shortest_program(tmp_path: Path) -> None:
    """One step, no optimizer, with every warning an error."""
    script = textwrap.dedent(
        """
        import torch, gradsight, sys
        model = torch.nn.Linear(2, 1)
        with gradsight.watch(model, run_dir=sys.argv[1]) as watched:
            model(torch.ones(1, 2)).sum().backward()
            watched.step(loss=1.0)
        print(next(gradsight.open_run(sys.argv[1]).steps()).total_norm)
        """
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(math.sqrt(3))


def test_a_forked_child_leaves_its_parents_record_alone(tmp_path: Path) -> None:
    """With an optimizer, by hand, and through the store itself; what the child opens anew is its
    own.
    """
    script = textwrap.dedent(
        """
        import os, sys, torch, gradsight
        torch.set_num_threads(1)
        model, place = torch.nn.Linear(4, 2), sys.argv[1]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def steps(count, watched=None):
            for _ in range(count):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step() if watched is None else watched.step()

        first, second = gradsight.watch(model, optimizer, run_dir=place + "/a"), gradsight.watch(model, run_dir=place + "/b")
        tracker = gradsight.MetricsTracker(place + "/c")
        steps(3)
        steps(2, second)
        if os.fork() == 0:
            steps(5)
            steps(5, second)
            tracker.log_scalar("of the child", 1.0, 0)
            with gradsight.watch(model, optimizer, run_dir=place + "/d"):
                steps(4)
            sys.exit(0)
        assert os.wait()[1] == 0
        steps(1)
        tracker.log_scalar("of the parent", 1.0, 0)
        for each in (first, second, tracker):
            each.close()
        """
    )
    done = run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [len(list(open_run(tmp_path / name).steps())) for name in "abd"] == [4, 2, 4]
    assert [scalar.name for scalar in open_run(tmp_path / "c").scalars()] == ["of the parent"]
    assert (
        done.stderr.count(
            "this process was forked from one that is being recorded; what it trains is not"
        )
        == 2
    )


def test_output_that_nobody_reads_any_more_ends_quietly(tmp_path: Path) -> None:
    """As with `gradsight report RUN | head -1`; 141 is what a shell says of a process that SIGPIPE
    ended.
    """
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer, run_dir=tmp_path):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    reading, writing = os.pipe()
    os.close(reading)
    command = ["-m", "gradsight", "report", tmp_path]
    done = warm.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("whole_model", [False, True])
def test_a_loss_in_bfloat16(whole_model: bool, tmp_path: Path) -> None:
    """Autocast makes one where no operation of the loss asks for more."""
    net = nn.Linear(3, 2)
    inputs = torch.randn(4, 3)
    if whole_model:
        net = net.bfloat16()
        inputs = inputs.bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    with watch(net, optimizer, run_dir=tmp_path) as watched:
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not whole_model):
                loss = net(inputs).square().mean()
            assert loss.dtype is torch.bfloat16
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watched.log(loss=loss)
            losses.append(float(loss.detach()))
    run = open_run(tmp_path)
    assert [step.loss for step in run.steps()] == losses
    assert {step.gradient for step in run.steps()} == {"true"}
    assert not list(run.problems())
