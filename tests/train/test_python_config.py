"""Config files in Python, such as nanoGPT's: read as assignments, never run."""

from pathlib import Path

import pytest

from gradsight.cli.train import app, read_config
from gradsight.errors import UsageError
from gradsight.train.config import Settings, from_dict, options_of
from gradsight.train.python_config import assignments, read_python_config

NANOGPT = """
# as somebody who trains with nanoGPT has it lying about
out_dir = 'runs/char'
eval_interval = 25
eval_iters = 3          # batches, not samples
log_interval = 5
wandb_log = True
wandb_project = 'owls'
dataset = 'shakespeare_char'
gradient_accumulation_steps = 5 * 8
batch_size = 8
block_size = 2 * (64 + 64)
n_layer = 3
n_head = 2
n_embd = 32
dropout = 0.1
learning_rate = 2e-3
max_iters = 70
lr_decay_iters = 70
min_lr = 5e-4
beta1: float = 0.8
beta2 = 0.98
weight_decay = -(-1) / 5
warmup_iters = 7
grad_clip = 0.5
device = 'cuda:1'
dtype = 'bfloat16'
compile = False
bias = True
init_from = 'scratch'
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "train_char.py"
    file.write_text(text)
    return file


def settings_in(tmp_path: Path, text: str) -> dict[str, object]:
    """The options that a file changes."""
    default = dict(options_of(Settings()))
    found = options_of(from_dict(read_python_config(written(tmp_path, text)).settings, "it"))
    return {name: value for name, value in found if value != default[name]}


def test_what_has_an_equal_is_taken(tmp_path: Path) -> None:
    assert settings_in(tmp_path, NANOGPT) == {
        "results_dir": "runs/char",
        "eval_interval": 25,
        "eval_samples": 24,
        "log_interval": 5,
        "trainer.callbacks.watch.sinks": ("wandb",),
        "gradient_accumulation_steps": 40,
        "batch_size": 8,
        "block_size": 256,
        "model.n_layer": 3,
        "model.n_head": 2,
        "model.n_embd": 32,
        "model.dropout": 0.1,
        "learning_rate": 2e-3,
        "max_steps": 70,
        "optimizer.min_lr_ratio": 0.25,
        "optimizer.beta1": 0.8,
        "optimizer.beta2": 0.98,
        "optimizer.weight_decay": 0.2,
        "warmup_steps": 7,
        "grad_clip": 0.5,
        "device": "cuda",
        "train_dtype": "bfloat16",
    }
    left_out = read_python_config(tmp_path / "train_char.py").left_out
    assert left_out == ("wandb_project", "dataset", "lr_decay_iters")


@pytest.mark.parametrize(
    ("text", "settings", "left_out"),
    [
        ("dtype = 'float16'\ndevice = 'mps'\ncompile = True", {}, ("dtype", "device", "compile")),
        ("init_from = 'gpt2-xl'\nbias = False", {}, ("init_from", "bias")),
        ("model = {'n_layer': 3}\nn_head = 2", {"model.n_head": 2}, ("model",)),
        ("eval_iters = 2", {"eval_samples": 8}, ()),
        (
            "decay_lr = False\nmin_lr = 1e-5\nwarmup_iters = 30",
            {"optimizer.min_lr_ratio": 1.0, "warmup_steps": 0},
            (),
        ),
        ("decay_lr = True\nwandb_log = False\neval_only = False", {}, ()),
        (
            "'''Ours.'''\ngradient_checkpointing: bool = True\nmethod = 'Regular'",
            {"gradient_checkpointing": True, "method": "Regular"},
            (),
        ),
        ("", {}, ()),
    ],
)
def test_single_settings(
    text: str, settings: dict[str, object], left_out: tuple[str, ...], tmp_path: Path
) -> None:
    assert settings_in(tmp_path, text) == settings
    assert read_python_config(tmp_path / "train_char.py").left_out == left_out


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "name = str(5)",
        "name = f'{5}'",
        "exec(open('configurator.py').read())",
        "batch_size = max_iters",
        "batch_size += 2",
        "a, b = 1, 2",
        "a.b = 3",
        "size: int",
        "for i in range(3): pass",
        "if True: batch_size = 3",
        "def f(): return 3",
        "name = 'a' * 9",
        "name = [0] * 9",
        "size = 9 ** 9 ** 9",
        "rate = 1 / 0",
        "flag = not True",
        "flag = True + 1",
    ],
)
def test_a_file_that_does_more_is_refused(line: str, tmp_path: Path) -> None:
    file = written(tmp_path, f"batch_size = 3\n\n{line}\n")
    with pytest.raises(UsageError, match="line 3: expected `name = value`") as refused:
        read_config(file)
    assert f"got `{line}`" in str(refused.value)
    assert "read and never run" in str(refused.value)


def test_nothing_in_the_file_is_run(tmp_path: Path) -> None:
    trace = tmp_path / "was_run"
    file = written(tmp_path, f"x = open({str(trace)!r}, 'w')\n")
    with pytest.raises(UsageError, match="never run"):
        read_config(file)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size = ", "is not Python: invalid syntax"),
        ("x = " + "(" * 10_000, "is not Python"),
        ("x = " + "+".join("1" * 5000), "is not Python: maximum recursion|never run"),
        ("max_iters = 1.5", "max_steps should be int, got 1.5"),
        ("eval_iters = 'many'", "eval_iters should be a number, got 'many'"),
        ("min_lr = None", "min_lr should be a number, got None"),
        ("batch_size = 0", "--batch_size must be 1 or more, got 0"),
    ],
)
def test_wrong_values(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        app.parse_args(["--config", str(written(tmp_path, text))])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_config(tmp_path / "none.py")
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not Python"):
        read_config(tmp_path / "bytes.py")


def test_the_command_line_wins_and_one_line_names_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "max_iters = 70\nbatch_size = 3\ndataset = 'x'\nbackend = 'nccl'\n")
    tokens = ["--config", str(file), "--max_iters", "10"]
    _, bound, _ = app.parse_args(tokens)
    settings = bound.arguments["settings"]
    assert (settings.max_steps, settings.batch_size) == (10, 3)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"gradsight: --config {file}: not used, for nothing here is equal: dataset, backend"
    ]
    monkeypatch.setenv("RANK", "1")
    app.parse_args(tokens)
    assert capsys.readouterr().out == ""


def test_later_lines_win() -> None:
    assert assignments("a = b = 1\na = -2", "it") == {"a": -2, "b": 1}
