"""examples/GradDotProd_LM: the commands of its README, with flags that make them small.

`train.sh` hands its arguments to `train.py`. It is run itself where it trains by default and where
it refuses a flag; the other tests start `train.py` in a warm process.
"""

import ast
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradsight
import warm
from examples.seed_lines import proves

EXAMPLE = Path(__file__).parents[2] / "examples" / "GradDotProd_LM"
SMALL = [
    *("--model.n_layer", "2", "--model.n_embd", "16", "--model.vocab_size", "256"),
    *("--block_size", "32", "--max_steps", "4", "--eval_samples", "2", "--val_batch_size", "2"),
    *("--dot_prod_save_interval", "2", "--startup_report", "false"),
]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of the folder, to be edited and to keep its results."""
    copy = tmp_path / "GradDotProd_LM"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("Results", "__pycache__"))
    return copy


def run_train_sh(example: Path, *flags: str, cwd: Path, expect: int = 0) -> str:
    """Run train.sh in a folder, with this Python as `python3`; return what it prints."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [example / "train.sh", *flags],
        cwd=cwd,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def python(*command: str | Path, cwd: Path) -> str:
    """Run a script or `-c CODE` in a warm process; return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def edit(example: Path, **values: Any) -> None:
    """Give settings of config_file.py other values, as an editor would."""
    file = example / "config_file.py"
    text = file.read_text()
    for name, value in values.items():
        text, changed = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value!r}", text)
        assert changed == 1
    file.write_text(text)


def settings_of(run_dir: Path) -> dict[str, Any]:
    """The trainer's settings in a run's config.json."""
    settings: dict[str, Any] = gradsight.open_run(run_dir).config["settings"]["train"]
    return settings


@pytest.mark.slow
@proves(2, "`./train.sh --batch_size 2`")
@proves(2, "ensure you are running from `GradDotProd_LM/`", "from any directory")
@proves(2, "`--max_steps`, `--val_batch_size`, `--dot_prod_save_interval`")
@proves(2, "`Results/[experiment_name]/` with `grad_dotprods/`, `training_log.json`, `config.json`")
@proves(2, "`training_log.json`: training metrics")
def test_scores_by_default(example: Path, tmp_path: Path) -> None:
    run_train_sh(example, "--batch_size", "2", *SMALL, cwd=tmp_path)
    run_dir = example / "Results" / "GradDotProd-GPT2-Small"
    names = {file.name for file in run_dir.iterdir()}
    assert {"grad_dotprods", "training_log.json", "config.json"} <= names
    scores = gradsight.read_scores(run_dir)
    assert scores.num_rows == 4 * 2
    assert "by_parameter" not in scores.column_names
    logged = json.loads((run_dir / "training_log.json").read_text())
    assert {"step", "loss", "lr", "grad_norm", "val_loss"} <= logged[-1].keys()
    (snippet,) = re.findall(r"```python\n(.*?)```", (example / "README.md").read_text(), re.DOTALL)
    said = python("-c", snippet, cwd=example)
    assert "['step', 'sample_id', 'domain', 'target', 'score', 'lr', 'clip_coef']" in said
    # Continued with its own settings, which are not those of the config file any more.
    edit(example, model_dtype="bfloat16", per_parameter=True)
    python("train.py", "--resume", "--max_steps", "6", cwd=example)
    assert gradsight.read_scores(run_dir).num_rows == 6 * 2


@proves(2, "`./train.sh --batch_size 2 --method Regular`")
@proves(2, "`./train.sh --eval_only`")
@pytest.mark.slow
def test_regular_training_and_evaluation(example: Path) -> None:
    regular = ["--batch_size", "2", "--method", "Regular"]
    python("train.py", *regular, *SMALL, cwd=example)
    run_dir = example / "Results" / "Regular-GPT2-Small"
    assert not (run_dir / "grad_dotprods").exists()
    # The run knows its own sizes: the architecture's would not fit its weights.
    said = python("train.py", "--method", "Regular", "--eval_only", cwd=example)
    assert "the weights after 4 steps" in said
    assert re.search(r"val_loss +\d\.\d{4}", said)


@proves(2, "`config_file.py`: `RESULTS_DIR`, `PILE_DATA_DIR`, `model_dtype`, `train_dtype`")
@proves(
    2,
    "`iter_000010.pkl`, `iter_000020.pkl`, ...",
    "`iter_000010.parquet`, which cannot run code; the pickles beside them with `--trainer.callbacks.ghost.format=pkl`",
)
@proves(
    2,
    "per-parameter dot products",
    "kept with `per_parameter = True` in `config_file.py`; always summed",
)
@pytest.mark.slow
def test_the_config_file_is_obeyed_and_flags_win(example: Path, tmp_path: Path) -> None:
    data = tmp_path / "tokens"
    data.mkdir()
    (data / "pile.bin").write_bytes(bytes([65, 0, 66, 0, 67, 0]) * 2000)
    edit(
        example,
        RESULTS_DIR=str(tmp_path / "elsewhere"),
        PILE_DATA_DIR=str(data),
        model_dtype="bfloat16",
        train_dtype="bfloat16",
        per_parameter=True,
    )
    flags = ["--model_dtype=float32", "--trainer.callbacks.ghost.format=pkl"]
    python("train.py", "--batch_size", "2", *SMALL, *flags, cwd=example)
    run_dir = tmp_path / "elsewhere" / "GradDotProd-GPT2-Small"
    settings = settings_of(run_dir)
    assert (settings["model_dtype"], settings["train_dtype"]) == ("float32", "bfloat16")
    assert settings["data"] == str(data)
    scores = gradsight.read_scores(run_dir)
    parameters = len(scores["by_parameter"][0].as_py())
    assert parameters == 28
    columns = pickle.loads((run_dir / "grad_dotprods" / "iter_000002.pkl").read_bytes())
    assert list(columns) == scores.column_names
    assert columns["by_parameter"].shape == (4, parameters)


@pytest.mark.slow
@proves(
    2,
    "`./train.sh --batch_size 4` on several devices, found by themselves",
    "as written, one process for each GPU; elsewhere `--num_processes 2`",
)
def test_two_processes_score_as_one_does(example: Path) -> None:
    flags = [*SMALL, "--trainer.callbacks.ghost.exact_grad", "true"]
    two = ["--batch_size", "4", "--num_processes", "2", "--experiment", "two"]
    one = ["--batch_size", "8", "--experiment", "one"]
    python("train.py", *two, *flags, cwd=example)
    python("train.py", *one, *flags, cwd=example)
    assert by_sample(example / "Results" / "two") == pytest.approx(
        by_sample(example / "Results" / "one"), abs=1e-5
    )


def by_sample(run_dir: Path) -> dict[tuple[int, int], float]:
    rows = gradsight.read_scores(run_dir).to_pylist()
    assert len(rows) == 4 * 8
    return {(row["step"], row["sample_id"]): row["score"] for row in rows}


@proves(
    2,
    "the validation batch alongside the training batch, in one pass",
    "as written: one forward and one backward pass, also with dropout and in several processes",
)
@proves(2, "metrics saved at intervals, and let go afterwards")
@pytest.mark.slow
def test_the_loop_by_hand(example: Path, tmp_path: Path) -> None:
    small = ["--max_steps", "4", "--dot_prod_save_interval", "2", "--n_embd", "16"]
    said = python(example / "training_loop.py", *small, cwd=tmp_path)
    run_dir = example / "Results" / "training_loop"
    assert f"16 scores in {run_dir}" in said
    assert sorted(file.name for file in (run_dir / "grad_dotprods").iterdir()) == [
        "iter_000002.parquet",
        "iter_000004.parquet",
    ]
    # Again, it begins anew.
    python("training_loop.py", *small, "--batch_size", "2", cwd=example)
    assert gradsight.read_scores(run_dir).num_rows == 8


@proves(
    2,
    "`training_loop.py`: `attach_train_batch`, `prepare_forward_input`, `model(X_forward, Y_forward).loss`, `backward`, `prepare_gradients`, `aggregate_and_log`",
)
def test_the_loop_has_the_six_steps() -> None:
    loop = (EXAMPLE / "training_loop.py").read_text()
    calls = [
        "ghost_engine.attach_train_batch(X_train, Y_train, iteration, ",
        "X_forward, Y_forward = ghost_engine.prepare_forward_input(X_train, Y_train)",
        "loss = model(X_forward, Y_forward).loss",
        "loss.backward()",
        "ghost_engine.prepare_gradients()",
        "optimizer.step()",
        "ghost_engine.aggregate_and_log()",
    ]
    places = [loop.index(call) for call in calls]
    assert places == sorted(places)


@proves(
    2,
    "`./train.sh --batch_size 2 --learning_rate 1e-4 --max_steps 100000`",
    "as written; the test looks at what is handed on, and does not wait for the steps",
)
@proves(2, "`--method`: `GradDotProd` or `Regular`")
@proves(2, "`--architecture`: `GPT2-Small`, `GPT2-Medium`, `GPT2-Large`")
def test_every_flag_is_handed_through(example: Path) -> None:
    command = "import sys, train; print(train.with_settings(sys.argv[1:]))"
    flags = ["--batch_size", "2", "--learning_rate", "1e-4", "--max_steps", "100000"]
    said = python("-c", command, *flags, "--architecture=GPT2-Large", cwd=example)
    handed: list[str] = ast.literal_eval(said)
    assert handed[-7:] == [*flags, "--architecture=GPT2-Large"]
    assert [flag for flag in handed if flag.startswith("--architecture")] == handed[-1:]
    assert f"--results_dir={example / 'Results'}" in handed
    run_train_sh(example, "--method", "Other", cwd=example, expect=64)
    assert "Did you mean GPT2-Large?" in run_train_sh(
        example, "--architecture", "GPT2-large", cwd=example, expect=64
    )


@proves(2, "the entry to cite")
def test_the_page_has_the_entry_to_cite() -> None:
    page = (EXAMPLE / "README.md").read_text()
    for fact in ("Data Shapley in One Training Run", "2406.11011", "2024", "Jia, Ruoxi"):
        assert fact in page
