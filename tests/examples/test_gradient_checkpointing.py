"""Seed 5, typed as it is written: the verification, two runs by hand, and its checklist."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import warm
from examples.seed_lines import proves
from gradsight import MemoryMonitor, open_run
from gradsight.cli import main
from gradsight.memory import checkpointed as stand_in
from gradsight.train.config import ModelShape, Settings, options_of, to_dict
from gradsight.train.models import model_from_settings
from gradsight.train.processes import Processes
from gradsight.train.run import build

EXAMPLE = Path(__file__).parents[2] / "examples" / "gradient_checkpointing"
VERIFY = "python3 verify_gradient_checkpointing.py"
TRAIN = "python3 train.py --config config/train_shakespeare_char.py --max_iters 10"
SMALL = (
    "--batch_size 2 --block_size 32 --model.n_layer 1 --model.n_embd 48 --trainer.callbacks.watch"
    ".histogram_interval 100 --checkpoint_interval 0"
)
"""A smaller bite than the config file's, for a machine that has other things to do."""
TINY = Settings(
    block_size=16,
    model=ModelShape(n_layer=3, n_embd=16),
    device="cpu",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example, which its runs may fill."""
    place = tmp_path_factory.mktemp("seed5") / "gradient_checkpointing"
    shutil.copytree(EXAMPLE, place, ignore=shutil.ignore_patterns("Results", "__pycache__"))
    return place


def typed(command: str, folder: Path) -> str:
    """What a command that starts with `python3` prints in a folder, run in a warm process."""
    python, *arguments = command.split()
    assert python == "python3"
    surroundings = {**os.environ, "NO_COLOR": "1", "COLUMNS": "80"}
    done = warm.run(arguments, cwd=folder, env=surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def verified(folder: Path) -> str:
    return typed(VERIFY, folder)


@pytest.fixture(scope="module")
def without(folder: Path) -> str:
    return typed(f"{TRAIN} --gradient_checkpointing false {SMALL}", folder)


@pytest.fixture(scope="module")
def with_it(folder: Path, without: str) -> str:
    return typed(f"{TRAIN} --gradient_checkpointing true {SMALL}", folder)


@proves(5, "`python3 verify_gradient_checkpointing.py`, bare, and its output to the letter")
def test_the_output_of_the_verification(verified: str) -> None:
    number = r"\d+\.\d{3}"
    expected = "\n".join(
        [
            "RESULTS",
            "=" * 80,
            "",
            rf"  Baseline peak memory:    {number} GB",
            rf"  Optimized peak memory:   {number} GB",
            rf"  Memory reduction:        {number} GB \(\d\d\.\d%\)",
            "",
            r"  ✓ SUCCESS: Memory reduction \(\d\d\.\d%\) is within expected range \(20-40%\)",
            "",
            "VERIFICATION PASSED ✓",
            "",
        ]
    )
    assert re.fullmatch(expected, verified[verified.index("RESULTS") :])


@proves(
    5,
    "without and with checkpointing: both peaks are compared",
    "one step each, counted to the byte; the gradients are compared bit for bit as well",
)
def test_both_steps_give_the_same_gradients(verified: str) -> None:
    assert "Gradients and state:     bit for bit the same" in verified


@proves(5, '"CUDA is not available": can only be tested on a GPU', "works on the CPU as well")
def test_verification_needs_no_gpu(verified: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.is_available() or "VERIFICATION PASSED" in verified


@proves(
    5,
    "~20% more computation",
    "matrix products are counted; where the policy repeats none, the line says that it counts "
    "nothing else",
)
def test_the_extra_computation(verified: str) -> None:
    share = re.search(r"Extra operations: +(\d+\.\d)% of matrix products \(other work", verified)
    assert share is not None
    assert 15 < float(share[1]) < 30


@proves(5, "`gradsight memory verify` is the same, bare")
@pytest.mark.slow
def test_the_script_is_the_command(
    verified: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["memory", "verify"]) == 0
    assert capsys.readouterr().out == verified


@proves(5, "a reduction below 20% still passes if it is above 0%")
@pytest.mark.slow
def test_a_small_reduction_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "verify", "--batch_size", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "SUCCESS: Memory reduction (9.7%) is below the usual range (20-40%)" in out
    assert out.endswith("VERIFICATION PASSED ✓")


@pytest.mark.slow
@proves(
    5,
    "`python3 train.py --config config/train_shakespeare_char.py --max_iters 10 "
    "--gradient_checkpointing false|true`, in the same folder",
)
def test_both_runs_by_hand_side_by_side(folder: Path, without: str, with_it: str) -> None:
    for name, out in (("without", without), ("with", with_it)):
        place = Path("Results") / f"{name}-checkpointing"
        assert f"report: {place / 'report.md'}\n" in out
        settings = open_run(folder / place).config["settings"]["train"]
        # The file's, the command line's, and the file's under another name here.
        assert (settings["learning_rate"], settings["batch_size"]) == (1e-3, 2)
        assert (settings["max_steps"], settings["warmup_steps"]) == (10, 100)
        assert settings["optimizer"]["beta2"] == 0.99
        assert settings["gradient_checkpointing"] is (name == "with")


@proves(
    5,
    "`memory/gpu_max_allocated_gb: X.XXX` in the log",
    "every log line; without a GPU `memory/peak_rss_gb: X.XXX`, of the process",
)
def test_the_peak_is_in_every_line(without: str, with_it: str) -> None:
    for out in (without, with_it):
        lines = re.findall(r"^step \d+/10  loss .*$", out, re.MULTILINE)
        assert len(lines) == 10
        shown = [re.search(r"memory/peak_rss_gb: (\d+\.\d{3})$", line) for line in lines]
        assert None not in shown


@proves(5, "the recommended batch size is in the startup report", "never above the data's samples")
def test_a_batch_size_is_recommended(without: str) -> None:
    assert re.search(r"^Recommended batch size: (at most [\d,]+|any: all [\d,]+) ", without, re.M)


@proves(5, "`Reduction (%) = ((Baseline - Optimized) / Baseline) * 100`")
def test_the_formula(verified: str) -> None:
    baseline, optimized = (
        float(re.search(rf"{name} peak memory: +(\d\.\d+) GB", verified)[1])
        for name in ("Baseline", "Optimized")
    )
    stated = float(re.search(r"Memory reduction: .*\((\d+\.\d)%\)", verified)[1])
    assert (baseline - optimized) / baseline * 100 == pytest.approx(stated, abs=0.4)


# The seed's checklist, each item under its name.


@proves(
    5, "checklist: the flag exists in the model's config", "`gradient_checkpointing` of config.json"
)
def test_gradient_checkpointing_flag_exists_in_model_config(folder: Path, with_it: str) -> None:
    settings = open_run(folder / "Results/with-checkpointing").config["settings"]
    assert settings["train"]["gradient_checkpointing"] is True
    assert to_dict(Settings())["gradient_checkpointing"] is False
    model_from_settings(settings)  # it is the model's config: the model is built from it


@proves(5, "checklist: the flag exists in the trainer's config")
def test_gradient_checkpointing_flag_exists_in_train_config() -> None:
    assert dict(options_of(Settings()))["gradient_checkpointing"] is False


@pytest.fixture
def checkpointed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, bool], list[dict[str, Any]]]:
    """How torch's checkpoint is called in one pass of a model of three blocks."""
    calls: list[dict[str, Any]] = []
    assert stand_in.checkpoint is torch.utils.checkpoint.checkpoint

    def counted(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        calls.append(options)
        return torch.utils.checkpoint.checkpoint(run, *args, **options)

    monkeypatch.setattr(stand_in, "checkpoint", counted)

    def passed(flag: bool, training: bool) -> list[dict[str, Any]]:
        calls.clear()
        model, _ = build(replace(TINY, gradient_checkpointing=flag), Processes("cpu"))
        model.train(training)
        tokens = torch.zeros(2, 16, dtype=torch.long)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return list(calls)

    return passed


@proves(5, "checklist: the flag is passed from the trainer's config to the model")
def test_flag_is_passed_from_train_config_to_model_config(
    checkpointed: Callable[[bool, bool], list[dict[str, Any]]],
) -> None:
    assert len(checkpointed(True, True)) == 3
    assert len(checkpointed(False, True)) == 0


@proves(5, "checklist: `torch.utils.checkpoint.checkpoint(use_reentrant=False)`, in training only")
def test_model_uses_torch_utils_checkpoint_checkpoint_when_flag_is_true(
    checkpointed: Callable[[bool, bool], list[dict[str, Any]]],
) -> None:
    assert checkpointed(True, True) == [{"use_reentrant": False}] * 3
    assert checkpointed(True, False) == []


@proves(
    5,
    "checklist: `MemoryMonitorCallback` logs peak memory",
    "in the trainer, and as `gradsight.integrations.hf.MemoryMonitorCallback` and "
    "`gradsight.integrations.lightning.MemoryMonitorCallback` in other people's",
)
def test_memory_monitoring_callback_logs_peak_memory(
    folder: Path, with_it: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = open_run(folder / "Results/with-checkpointing").memory()
    assert [s.step for s in recorded if s.name == "memory/peak_rss_gb"] == list(range(10))
    figures = ("memory_allocated", "memory_reserved", "max_memory_allocated")
    for name in figures:
        monkeypatch.setattr(torch.cuda, name, lambda: 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert list(MemoryMonitor().sample(None, 0)) == [
        "memory/gpu_allocated_gb",
        "memory/gpu_reserved_gb",
        "memory/gpu_max_allocated_gb",
    ]


@proves(
    5, 'checklist: the startup report shows "✓ Gradient checkpointing: ENABLED"', "with the policy"
)
def test_startup_report_shows_gradient_checkpointing_status(without: str, with_it: str) -> None:
    assert "✗ Gradient checkpointing: DISABLED\n" in without
    assert "✓ Gradient checkpointing: ENABLED (full)\n" in with_it


@proves(5, "checklist: training with checkpointing completes without errors", "and learns the same")
def test_training_with_checkpointing_completes_without_errors(without: str, with_it: str) -> None:
    def numbers(out: str) -> list[str]:
        return re.findall(r"^step \d+/10  (?:loss \S+  norm \S+|losses: .*)", out, re.MULTILINE)

    assert len(numbers(with_it)) == 12
    assert numbers(with_it) == numbers(without)


@proves(5, "checklist: peak memory is reduced by more than 0%, ideally 20 to 40%")
def test_peak_memory_is_reduced(verified: str) -> None:
    share = re.search(r"Memory reduction: .*\((\d+\.\d)%\)", verified)
    assert share is not None
    assert 20 <= float(share[1]) <= 40


def test_the_readme_types_these_commands() -> None:
    text = (EXAMPLE / "README.md").read_text()
    lines = [
        line.partition("  #")[0].strip()
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    flags = [f"{TRAIN} --gradient_checkpointing {flag}" for flag in ("false", "true")]
    assert lines == ["cd examples/gradient_checkpointing", VERIFY, *flags]


def test_the_readme_shows_what_is_printed(verified: str) -> None:
    assert f"```text\n{verified}```" in (EXAMPLE / "README.md").read_text()
