"""A mistyped path, a missing extra and a wrong option end with 64, which is no verdict."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gradsight
from gradsight.cli import main

RUN_EACH = """
import json, os, sys, tempfile
from gradsight.cli import main
outcomes = []
for tokens, missing, folder in json.load(sys.stdin):
    assert not {"torch", missing} & sys.modules.keys(), "the command's module has imported it"
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            os.dup2(errors.fileno(), 2)
            sys.modules[missing] = None
            code = main(tokens)
            sys.stderr.flush()
            assert "torch" not in sys.modules, "torch was imported for it"
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        outcomes.append([code, errors.read().decode()])
print(json.dumps(outcomes))
"""
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


WITHOUT_AN_EXTRA = [
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
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, Path]]:
    """Exit code, standard error and working directory of each case, in one new interpreter.

    The interpreter has not imported torch and forks for each case.
    """
    folders = [tmp_path_factory.mktemp("case") for _ in WITHOUT_AN_EXTRA]
    cases = [
        ([token.format(here=__file__) for token in tokens], missing, str(folder))
        for (tokens, missing, _), folder in zip(WITHOUT_AN_EXTRA, folders, strict=True)
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH], input=json.dumps(cases), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    return [(*result, folder) for result, folder in zip(results, folders, strict=True)]


@pytest.mark.parametrize("case", range(len(WITHOUT_AN_EXTRA)))
def test_a_missing_extra_is_named_before_torch_is_imported(
    case: int, outcomes: list[tuple[int, str, Path]]
) -> None:
    _, missing, extra = WITHOUT_AN_EXTRA[case]
    code, message, folder = outcomes[case]
    assert code == 64, message
    assert f"needs the package {missing!r}" in message
    assert f"pip install 'gradsight[{extra}]'" in message
    assert list(folder.iterdir()) == []


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
