"""Runs that are told to end, are killed, or run out of memory: real processes."""

import re
import shlex
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import gradsight
import warm
from gradsight.cli import main
from gradsight.train.stop_request import StopRequest
from train.small import differing, log, options, run, weights, write_text

LONG = {"max_steps": 12, "checkpoint_interval": 4, "eval_interval": 6, "log_interval": 3}
PATIENCE = 200
"""Seconds, more than any machine needs: only against hanging for ever."""
SIGNALLED = Path(__file__).with_name("signalled.py")


def start(command: list[str], folder: Path, *flags: str, **changes: Any) -> "subprocess.Popen[str]":
    """Train in a process of its own, as `python COMMAND TOKENS FLAGS` would."""
    if not (folder / "text").exists():
        write_text(folder / "text")
    tokens = options(
        data=folder / "text", results_dir=folder / "Results", experiment="b", **changes
    )
    pipe = subprocess.PIPE
    return warm.Popen(
        ["-u", *command, *tokens, *flags],
        stdout=pipe,
        stderr=pipe,
        text=True,
        preload=warm.TRANSFORMERS,
    )


def wait_for_step(process: "subprocess.Popen[str]", step: int) -> None:
    """Read lines until a step is reported."""
    assert process.stdout is not None
    for line in process.stdout:
        reported = re.match(r"step (\d+)/\d+  loss ", line)
        if reported and int(reported[1]) >= step:
            return
    raise AssertionError(f"ended before step {step}: {process.stderr and process.stderr.read()}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the uninterrupted run is."""
    folder = tmp_path_factory.mktemp("ending")
    torch.set_num_threads(1)  # as in the runs that are compared with it: sums depend on it
    run(folder, experiment="whole", **LONG)
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_by_a_signal_and_resumed(
    number: signal.Signals, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(SIGNALLED), "8", str(int(number))]
    with start(command, folder, "--overwrite", **LONG) as process:
        out, err = process.communicate(timeout=PATIENCE)
    place = folder / "Results" / "b"
    made = len(list(gradsight.open_run(place).steps()))
    if number == signal.SIGKILL:
        assert 6 <= made <= 8, "of eight steps at most the last two are lost"
        assert process.returncode == -signal.SIGKILL
        again = ["train", "--resume", "--results_dir", str(place.parent), "--experiment", "b"]
    else:
        assert made == 9, "the step is finished"
        assert process.returncode == 128 + number, err
        assert f"Stopped by {number.name}; the step was finished and saved. Continue with:" in out
        assert (place / "report.md").read_text()
        again = shlex.split(re.search(r"gradsight (train --resume.*)", out)[1])
        saved = weights(place)["optimizer/transformer.wte.weight/step"]
        assert float(saved) == made, "the last step is in the checkpoint"
    assert main(again) == 0
    whole = folder / "Results" / "whole"
    assert differing(weights(whole), weights(place)) == []
    assert log(whole) == log(place)
    steps = [
        [(s.step, s.loss, s.total_norm) for s in gradsight.open_run(p).steps()]
        for p in (whole, place)
    ]
    assert steps[0] == steps[1]
    scores = [
        sorted((s.step, s.sample_id, s.score) for s in gradsight.open_run(p).scores())
        for p in (whole, place)
    ]
    assert scores[0] == scores[1]


@pytest.mark.slow
def test_two_processes_started_by_the_command_end_together_and_one_goes_on(folder: Path) -> None:
    # Far more steps than are made before the signal comes, however late it is.
    endless = LONG | {"batch_size": 2, "max_steps": 100_000, "eval_interval": 100_000}
    train = ["-m", "gradsight", "train"]
    with start(train, folder, "--overwrite", "--num_processes=2", **endless) as process:
        wait_for_step(process, 3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGINT, err
    assert out.count("Stopped by SIGINT") == 1, "one process speaks"
    place = folder / "Results" / "b"
    assert gradsight.open_run(place).config["world_size"] == 2
    made = len(list(gradsight.open_run(place).steps()))
    run(folder, "--resume", experiment="b", **LONG | {"max_steps": made + 1, "batch_size": 4})
    whole, resumed = (
        {(s.step, s.sample_id) for s in gradsight.open_run(p).scores() if s.step <= made}
        for p in (folder / "Results" / "whole", place)
    )
    both = {(step, sample) for step, sample in resumed if step < LONG["max_steps"]}
    assert both == whole, "the order of samples is one"


def test_asked_twice_it_ends_at_once_but_a_launcher_may_pass_a_signal_on() -> None:
    before = signal.getsignal(signal.SIGINT)
    now = 100.0
    with StopRequest(clock=lambda: now) as request:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert request.signal == signal.SIGINT
        now += 2.0
        signal.raise_signal(signal.SIGTERM)
        assert request.signal == signal.SIGINT, "within two seconds it is the same wish"
        now += 0.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_may_train(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        place = pool.submit(run, tmp_path, method="Regular", max_steps=1).result()
    assert len(list(gradsight.open_run(place).steps())) == 1


def test_settings_are_refused_before_processes_are_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--num_processes", "2", "--data", str(tmp_path / "none")]) == 64
    assert "there is no such file" in capsys.readouterr().err
    assert main(["train", "--num_processes", "2", "--architecture", "GTP2-Small"]) == 64
    assert "Did you mean GPT2-Small?" in capsys.readouterr().err


LIMITED = """
import resource, sys
from gradsight.cli import main
resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))
sys.exit(main(["train", *sys.argv[1:]]))
"""


def train_within_2_gib(tmp_path: Path, batch_size: int) -> "subprocess.CompletedProcess[str]":
    write_text(tmp_path / "text")
    large = {
        "block_size": 512,
        "batch_size": batch_size,
        "model.n_embd": 64,
        "eval_samples": 1,
        "method": "Regular",
    }
    tokens = options(
        data=tmp_path / "text", results_dir=tmp_path / "Results", experiment="b", **large
    )
    command = ["-c", LIMITED, *tokens]
    return warm.run(
        command, capture_output=True, text=True, timeout=PATIENCE, preload=warm.TRANSFORMERS
    )


@pytest.mark.slow
def test_a_batch_that_can_never_fit_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    done = train_within_2_gib(tmp_path, 8000)
    assert done.returncode == 64, done.stderr
    assert "--batch_size 8000 with --block_size 512 would take 73." in done.stderr
    assert "and there are 2.15 GB on cpu in all" in done.stderr
    assert re.search(r"gradsight train YOUR_OPTIONS --batch_size \d+ ", done.stderr)
    assert "--gradient_checkpointing" not in done.stderr  # it would not fit either
    assert not (tmp_path / "Results").exists()


@pytest.mark.slow
def test_out_of_memory_says_what_would_fit(tmp_path: Path) -> None:
    """The tensors alone would fit, and torch itself does not beside them."""
    done = train_within_2_gib(tmp_path, 220)
    assert done.returncode == 2, done.stderr
    assert "out of memory on cpu with --batch_size 220 and --block_size 512" in done.stderr
    assert "Traceback" not in done.stderr
    config = re.escape(str(tmp_path / "Results" / "b" / "config.json"))
    base = rf"  gradsight train --config {config} --overwrite"
    batch = re.search(
        rf"{base} --batch_size (\d+) --gradient_accumulation_steps (\d+)", done.stderr
    )
    assert batch is not None
    assert 1 <= int(batch[1]) < 220 <= int(batch[1]) * int(batch[2])
    assert re.search(rf"{base} --block_size \d+$", done.stderr, re.MULTILINE)
    assert re.search(rf"{base} --gradient_checkpointing true", done.stderr)
    start_from = batch[0].split()[1:5]
    assert main([*start_from, "--max_steps=1", "--batch_size=2"]) == 0, (
        "config.json is there to start from"
    )
