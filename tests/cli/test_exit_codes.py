"""A mistyped path, a missing extra and a wrong option end with 64, which is no verdict."""

import subprocess
import sys
from pathlib import Path

import pytest

import gradsight
from gradsight.cli import main

WITHOUT = """
import sys
for name in {names!r}:
    sys.modules[name] = None
from gradsight.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "torch was imported for it"
sys.exit(code)
"""


@pytest.mark.parametrize(
    "tokens",
    [
        ("report",),
        ("influence",),
        ("replay",),
        ("dump", "list"),
        ("dump", "show"),
        ("dump", "verify"),
        ("dump", "diff", "{folder}"),
        ("compare", "{folder}"),
    ],
    ids=" ".join,
)
def test_a_path_without_a_run_is_wrong_usage(
    tokens: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("text")
    named = [token.format(folder=tmp_path) for token in tokens]
    for place in (tmp_path / "nowhere", tmp_path, tmp_path / "file", tmp_path / ("x" * 5000)):
        assert main([*named, str(place)]) == 64, place
        assert capsys.readouterr().err.startswith("gradsight: ")


def test_a_damaged_record_is_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sqlite").write_bytes(b"this is not a database" * 100)
    assert main(["report", str(tmp_path)]) == 2
    assert "is damaged or is not a run" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with gradsight.MetricsTracker(tmp_path) as tracker:
        tracker.log_scalar("loss", 1.0, 0)
    (tmp_path / "report.md").mkdir()
    assert main(["report", str(tmp_path)]) == 64
    assert "report.md cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "missing", "extra"),
    [
        (("train",), "transformers", "hf"),
        (("demo",), "transformers", "hf"),
        (("memory", "verify", "--architecture", "char"), "transformers", "hf"),
        (("memory", "predict", "--architecture", "char"), "transformers", "hf"),
        (("memory", "predict"), "transformers", "hf"),
        (("memory", "plan", "--architecture", "char", "--budget", "1GB"), "transformers", "hf"),
        (("train", "--trainer.callbacks.watch.sinks", "wandb"), "wandb", "wandb"),
        (("train", "--trainer.callbacks.watch.sinks", "trackio"), "trackio", "trackio"),
        (("train", "--trainer.callbacks.watch.sinks", "tensorboard"), "tensorboard", "tensorboard"),
        (("train", "--tokenizer", "{here}"), "tokenizers", "hf"),
        (("serve", "{here}"), "starlette", "serve"),
        (("serve", "{here}"), "uvicorn", "serve"),
    ],
)
def test_a_missing_extra_is_named_before_torch_is_imported(
    tokens: tuple[str, ...], missing: str, extra: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", WITHOUT.format(names=[missing])]
    command += [token.format(here=__file__) for token in tokens]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 64, done.stderr
    assert f"needs the package {missing!r}" in done.stderr
    assert f"pip install 'gradsight[{extra}]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_version_names_torch_without_importing_it() -> None:
    command = [sys.executable, "-c", WITHOUT.format(names=[]), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"gradsight {gradsight.__version__}, torch 2.")
    hidden = """
from importlib import metadata
known = metadata.version
def version(name):
    if name == "torch":
        raise metadata.PackageNotFoundError
    return known(name)
metadata.version = version
"""
    command = [sys.executable, "-c", hidden + WITHOUT.format(names=[]), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ", torch not installed (tested with 2.13.0), Python 3." in done.stdout
