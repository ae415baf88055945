"""gradsight memory: what it prints, at 80 columns and without a terminal, and its exit codes."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradsight.cli import main
from gradsight.cli.memory import gigabytes
from gradsight.store.reader import open_run

MODELS = """
import torch
from torch import nn
from helper import WIDTH


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 4 * WIDTH), norm(4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


def make(norm):
    model = nn.Sequential(*(Block(norm) for _ in range(4)))
    return model, torch.randn(256, WIDTH), lambda m, b: m(b).square().mean()


def build():
    return make(nn.LayerNorm)


def unsteady():
    return make(nn.BatchNorm1d)


def broken():
    raise OSError("no such shard")


NUMBER = 3
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    (tmp_path / "helper.py").write_text("WIDTH = 32\n")
    (tmp_path / "models.py").write_text(MODELS)
    return str(tmp_path / "models.py")


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*tokens: str) -> tuple[int, str, str]:
        code = main(["memory", *tokens])
        captured = capsys.readouterr()
        assert all(
            len(line) <= 80
            for line in captured.out.splitlines()
            if "apply_checkpointing" not in line and "..." not in line
        )
        return code, captured.out, captured.err

    return run


def test_verify_passes(run: Callable[..., tuple[int, str, str]], models: str) -> None:
    code, out, _ = run("verify", f"{models}:build")
    assert code == 0
    assert "RESULTS\n" + "=" * 80 in out
    for line in (
        r"  Baseline peak memory: +\d\.\d+ GB\n",
        r"  Optimized peak memory: +\d\.\d+ GB\n",
        r"  Memory reduction: +\d\.\d+ GB \(\d\d\.\d%\)\n",
        r"  Ceiling: +\d\d\.\d% of the baseline's peak are activations\n",
        r"  Gradients and state: +bit for bit the same",
        r"  ✓ SUCCESS: Memory reduction \(\d\d\.\d%\) is (within|above) ",
    ):
        assert re.search(line, out), line
    assert out.rstrip().endswith("VERIFICATION PASSED ✓")
    assert "\x1b" not in out


def test_verify_without_a_model(run: Callable[..., tuple[int, str, str]]) -> None:
    """The built-in model saves as much as is usual, and the last lines are the result alone."""
    code, out, _ = run("verify")
    assert code == 0
    assert out.startswith("Verifying char, batch 2 x 256 tokens, policy full ...\n")
    assert out[out.index("RESULTS") :].splitlines() == [
        "RESULTS",
        "=" * 80,
        "",
        "  Baseline peak memory:    0.272 GB",
        "  Optimized peak memory:   0.198 GB",
        "  Memory reduction:        0.075 GB (27.4%)",
        "",
        "  ✓ SUCCESS: Memory reduction (27.4%) is within expected range (20-40%)",
        "",
        "VERIFICATION PASSED ✓",
    ]


@pytest.mark.parametrize(
    "tokens", [("verify", "--policy", "selective"), ("plan", "--budget", "1GB")], ids=str
)
def test_operations_that_are_not_counted_are_not_called_free(
    run: Callable[..., tuple[int, str, str]], models: str, tokens: tuple[str, ...]
) -> None:
    """`selective` multiplies no matrices again, and does all other work again."""
    _, out, _ = run(tokens[0], f"{models}:build", *tokens[1:])
    assert "Extra operations:        0.0% of matrix products (other work is not counted)\n" in out


def test_verify_fails(run: Callable[..., tuple[int, str, str]], models: str) -> None:
    code, out, _ = run("verify", f"{models}:unsteady")
    assert code == 2
    assert "✗ FAILED: the buffer 0.norm.running_mean differs, with 11 more" in out
    assert "Likely cause: BatchNorm statistics: 0.norm" in out
    assert out.rstrip().endswith("VERIFICATION FAILED ✗")


def test_verify_fails_where_nothing_is_saved(
    run: Callable[..., tuple[int, str, str]], models: str
) -> None:
    code, out, _ = run("verify", f"{models}:build", "--policy", "none")
    assert code == 2
    assert "FAILED: Memory was not reduced (0.0%)" in out


def test_plan(run: Callable[..., tuple[int, str, str]], models: str) -> None:
    code, out, _ = run("plan", f"{models}:build", "--budget", "1GB")
    assert code == 0
    assert "Plan:                    none" in out
    code, out, err = run("plan", f"{models}:build", "--budget", "1500kB", "--optimizer", "none")
    assert code == 0, err
    assert err.startswith("Planning ")
    assert "Weighing" in err
    assert "ing " not in out.partition("Budget:")[0]  # progress is not among the results
    policy = re.search(r"Plan: +(\S+)", out)
    assert policy is not None
    assert (
        "    from gradsight import apply_checkpointing\n"
        f'    apply_checkpointing(model, "{policy[1]}")\n' in out
    )
    code, out, err = run("plan", f"{models}:build", "--budget", "10kB")
    assert code == 2
    assert "no checkpointing fits 10.0 kB: the smallest reachable peak is" in err


def test_predict(
    run: Callable[..., tuple[int, str, str]], models: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run("predict", f"{models}:build")
    assert code == 0
    assert re.search(r"models.py:build +0\.0M", out.replace("\n", "")) or "0.0M" in out
    monkeypatch.setattr(
        "gradsight.memory.predict.largest_batch",
        lambda *_, policy, **__: 33 if policy else 12,
    )
    code, out, _ = run(
        "predict",
        "--architecture",
        "char",
        "--batch_size",
        "2",
        "--memory",
        "300MB",
        "--device",
        "cuda",
    )
    assert code == 0
    assert re.search(r"char +10\.8M +2x256 +\d+ MB +\d+ MB +\d+\.\d% +\d+\.\d% +12 → 33", out)
    assert "not in this number: the CUDA context" in out


@pytest.mark.parametrize(
    ("tokens", "code", "message"),
    [
        (
            ("plan", "--budget", "1GB"),
            64,
            "give either a model (a configuration or file.py:build) or --architecture, for "
            "example --architecture GPT2-Small",
        ),
        (("verify", "{models}:build", "--architecture", "char"), 64, "give either"),
        (
            ("verify", "{models}:build", "--batch_size", "3"),
            64,
            "file.py:build makes its own batch",
        ),
        (
            ("verify", "{models}:build", "--dropout", "0.1"),
            64,
            "--dropout are for --architecture; file.py:build makes its own batch and model",
        ),
        (("verify", "{models}:build", "--run_dir", "{models}"), 64, "is a file; give a directory"),
        (("verify", "{models}:build", "--policy", "selective@-1"), 64, "'-1' is not a number of"),
        (("verify", "{models}:build", "--blocks", ""), 64, "has no module ''"),
        (("predict", "{models}:build", "--device", "cdua"), 64, 'Invalid value "cdua"'),
        (("plan", "{models}:build", "--budget", "6G"), 64, "'6G' is not a size of memory"),
        (("plan", "{models}:build", "--budget", "nan"), 64, "'nan' is not a size of memory"),
        (("plan", "{models}:build", "--budget", "1GB", "--optimizer", "AdamW"), 64, "Invalid"),
        (
            ("predict", "{models}:build", "--memory", "1GB"),
            64,
            "file.py:build makes its own batch: use --architecture",
        ),
        (("verify", "{models}"), 64, "a build function is given as file.py:function"),
        (("verify", "nowhere.py:build"), 64, "there is no file nowhere.py"),
        (("verify", "{models}:bild"), 64, "has no function 'bild'; it has Block, make, build"),
        (("verify", "{models}:NUMBER"), 64, "has no function 'NUMBER'"),
        (("verify", "{models}:broken"), 3, "build() raised OSError: no such shard"),
        (("verify", "{models}:build", "--policy", "most"), 64, "'most' is not a policy"),
        (
            ("verify", "--architecture", "gpt2-smal"),
            64,
            "unknown architecture 'gpt2-smal'; known are char, GPT2-Small",
        ),
        (("plan", "{models}:build", "--budget", "much"), 64, "'much' is not a size of memory"),
        (("predict", "--memory", "0GB"), 64, "must be above zero"),
    ],
)
def test_wrong_usage(
    run: Callable[..., tuple[int, str, str]],
    models: str,
    tokens: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    found, _, err = run(*(token.format(models=models) for token in tokens))
    assert (found, message in err) == (code, True), err


def test_a_file_that_fails_to_load(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text("import nothing_of_that_name")
    code, _, err = run("verify", f"{tmp_path}/bad.py:build")
    assert code == 3
    assert "bad.py raised ModuleNotFoundError when it was read" in err


def test_help_needs_no_torch() -> None:
    check = """
import sys
from gradsight.cli import main
main(["memory", "--help"])
main(["memory", "plan", "--help"])
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--batch_size" in done.stdout


def test_gigabytes() -> None:
    assert [gigabytes(n) for n in (0, 123, 5_000_000, 12_345_678, 6_100_000_000)] == [
        "0.000 GB",
        "0.000000 GB",
        "0.005000 GB",
        "0.012 GB",
        "6.100 GB",
    ]


def test_built_in_models() -> None:
    from gradsight.errors import UsageError
    from gradsight.memory.fake import fake_tensors
    from gradsight.train.config import ModelShape
    from gradsight.train.models import ARCHITECTURES, build_model, training_step

    with fake_tensors():
        counts = {
            name: sum(p.numel() for p in build_model(name).parameters()) / 1e6
            for name in ARCHITECTURES
        }
    assert counts == {
        "char": pytest.approx(10.8, abs=0.1),
        "GPT2-Small": pytest.approx(124.4, abs=0.1),
        "GPT2-Medium": pytest.approx(354.8, abs=0.1),
        "GPT2-Large": pytest.approx(774.0, abs=0.1),
    }
    model, batch = training_step("char", batch_size=2, block_size=16, dropout=0.1)()
    assert batch["input_ids"].shape == (2, 16)
    assert 4 < model(**batch).loss.item() < 7
    with pytest.raises(UsageError, match="batch_size must be 1 or more, got -1"):
        training_step("char", batch_size=-1)
    with pytest.raises(UsageError, match="dropout at least 0 and below 1"):
        build_model("char", ModelShape(dropout=1.5))


def test_the_verification_is_kept_in_a_run(models: str, tmp_path: Path) -> None:
    assert main(["memory", "verify", f"{models}:build", "--run_dir", str(tmp_path)]) == 0
    kept = {scalar.name: scalar.value for scalar in open_run(tmp_path).memory()}
    assert kept["checkpointing/passed"] == 1
    assert 0 < kept["checkpointing/reduction"] < 1


PAIRS = """
import torch
from torch import nn

class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    def forward(self, x):
        return self.second(self.first(x))

def build():
    return Logits(), (torch.ones(2, 8), torch.ones(2))

def with_loss():
    return Logits(), (torch.ones(64, 8), torch.ones(64, 8)), lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
"""


def test_a_batch_that_is_not_the_models_arguments(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "pairs.py").write_text(PAIRS)
    code, _, err = run("predict", f"{tmp_path}/pairs.py:build")
    assert code == 64
    assert "Logits.forward does not take the batch, 2 arguments: too many positional" in err
    assert "return (model, batch, loss_fn) from build()" in err


def test_blocks_are_named_as_the_error_says(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "pairs.py").write_text(PAIRS)
    place = f"{tmp_path}/pairs.py:with_loss"
    code, _, err = run("plan", place, "--budget", "1GB")
    assert code == 64
    assert "(to a command: --blocks first,second)" in err
    code, out, err = run("plan", place, "--budget", "1GB", "--blocks", "first,second")
    assert code == 0, err
    assert "2, first to second" in out


def test_a_plan_is_applied_to_the_blocks_that_were_named(
    run: Callable[..., tuple[int, str, str]], models: str
) -> None:
    options = ("--budget", "1500kB", "--optimizer", "none", "--blocks", "0,1,2")
    code, out, err = run("plan", f"{models}:build", *options)
    assert code == 0, err
    assert "blocks=['0', '1', '2'])" in out


def test_a_negative_budget_is_a_size(run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = run("plan", "--architecture", "char", "--budget", "-3GB")
    assert code == 64
    assert "a size of memory must be above zero, got '-3GB'" in err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--batch_size", "0", "--batch_size must be 1 or more, got 0"),
        ("--block_size", "-3", "--block_size must be 1 or more, got -3"),
        ("--dropout", "1.5", "--dropout must be at least 0 and below 1, got 1.5"),
    ],
)
def test_sizes_that_cannot_be_meant(
    option: str, value: str, message: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = run("plan", "--architecture", "char", "--budget", "1GB", option, value)
    assert (code, message in err) == (64, True), err
