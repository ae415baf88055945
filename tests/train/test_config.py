"""Settings: from the command line, from YAML, from a run's own config.json; and what is said of
wrong ones.
"""

import json
from pathlib import Path

import pytest

from gradsight.cli import main
from gradsight.cli.train import app, read_config
from gradsight.cli.train import app as train_app
from gradsight.errors import UsageError
from gradsight.train.config import Settings, from_dict, options_of, to_dict

OPTIONS = {
    "data": None,
    "data_weights": None,
    "tokenizer": None,
    "block_size": None,
    "architecture": "char",
    "gradient_checkpointing": False,
    "model.n_layer": None,
    "model.n_head": None,
    "model.n_embd": None,
    "model.vocab_size": None,
    "model.dropout": 0.0,
    "method": "GradDotProd",
    "batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_steps": 1000,
    "epochs": None,
    "learning_rate": 6e-4,
    "warmup_steps": 20,
    "grad_clip": 1.0,
    "seed": 0,
    "optimizer.weight_decay": 0.1,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-8,
    "optimizer.min_lr_ratio": 0.1,
    "val_batch_size": 4,
    "ghost_mode": "auto",
    "dot_prod_save_interval": 10,
    "eval_interval": 100,
    "eval_samples": 32,
    "log_interval": 10,
    "log_grad_dist_every": 5,
    "parallel": "ddp",
    "device": "auto",
    "model_dtype": "float32",
    "train_dtype": "float32",
    "startup_report": True,
    "results_dir": "Results",
    "experiment": None,
    "checkpoint_interval": 100,
    "keep_checkpoints": 2,
    "trainer.callbacks.grad_dump.enabled": False,
    "trainer.callbacks.grad_dump.start_step": 0,
    "trainer.callbacks.grad_dump.end_step": None,
    "trainer.callbacks.grad_dump.step_interval": 1,
    "trainer.callbacks.grad_dump.save_first_n": None,
    "trainer.callbacks.grad_dump.keep_last": None,
    "trainer.callbacks.grad_dump.max_bytes": None,
    "trainer.callbacks.grad_dump.asynchronous": True,
    "trainer.callbacks.grad_dump.dump_on": None,
    "trainer.callbacks.ghost.precondition": None,
    "trainer.callbacks.ghost.refresh_every": 1,
    "trainer.callbacks.ghost.exact_grad": False,
    "trainer.callbacks.ghost.per_parameter": False,
    "trainer.callbacks.ghost.self_check": True,
    "trainer.callbacks.ghost.format": "parquet",
    "trainer.callbacks.watch.histogram_interval": 50,
    "trainer.callbacks.watch.health": True,
    "trainer.callbacks.watch.recorder": "true",
    "trainer.callbacks.watch.sinks": (),
}


def test_options_and_their_defaults_are_frozen() -> None:
    assert dict(options_of(Settings())) == OPTIONS


def test_every_option_is_in_the_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    # The parser keeps its console, with the width that it had when it was first used.
    monkeypatch.setattr(train_app, "_fallback_console", None)
    assert main(["train", "--help"]) == 0
    text = "".join(capsys.readouterr().out.replace("│", " ").split())
    wanted = [*OPTIONS, "max_iters", "config", "resume", "overwrite", "eval_only", "num_processes"]
    assert [name for name in wanted if f"--{name}" not in text] == []


def settings_of(tokens: list[str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What a command line comes to; nothing is trained."""
    found: list[Settings] = []
    monkeypatch.setattr(
        "gradsight.train.run.run_training", lambda settings, **_: found.append(settings) or 0
    )
    assert main(["train", "--device", "cpu", *tokens]) == 0
    return found[0]


def test_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [
        "--max_iters",
        "7",
        "--gradient_checkpointing",
        "true",
        "--startup_report",
        "false",
        "--learning_rate",
        "1e-4",
    ]
    tokens += [
        "--trainer.callbacks.grad_dump.enabled=true",
        "--trainer.callbacks.grad_dump.save_first_n=100",
    ]
    found = settings_of(tokens, monkeypatch)
    dump = found.trainer.callbacks.grad_dump
    assert (
        found.max_steps,
        found.gradient_checkpointing,
        found.startup_report,
        found.learning_rate,
    ) == (7, True, False, 1e-4)
    assert (dump.enabled, dump.save_first_n, dump.step_interval) == (True, 100, 1)


def test_yaml_gives_settings_and_options_come_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "max_iters: 9\nbatch_size: 2\nlearning_rate: 1e-3\ngradient_checkpointing: true\n"
        "trainer: {callbacks: {grad_dump: {enabled: true, step_interval: 5}, watch: {recorder: false, sinks: [console]}}}\n"
    )
    found = settings_of(["--config", str(file), "--batch_size", "3"], monkeypatch)
    callbacks = found.trainer.callbacks
    assert (
        found.max_steps,
        found.batch_size,
        found.learning_rate,
        found.gradient_checkpointing,
    ) == (9, 3, 1e-3, True)
    assert (callbacks.grad_dump.enabled, callbacks.grad_dump.step_interval) == (True, 5)
    assert (callbacks.watch.recorder, callbacks.watch.sinks) == ("false", ("console",))
    assert settings_of([f"--config={file}", "--max_iters=1"], monkeypatch).max_steps == 1


def test_json_round_trip_of_settings_that_are_all_changed() -> None:
    changed = {
        "optimizer": {"eps": 1.1e-9},
        "trainer": {"callbacks": {"watch": {"sinks": ["console", "wandb"]}}},
    }
    one = from_dict({"seed": 3, "learning_rate": 0.1 + 0.2, "data": "x y", **changed}, "here")
    assert from_dict(json.loads(json.dumps(to_dict(one))), "there") == one
    assert one.trainer.callbacks.watch.sinks == ("console", "wandb")


def test_an_empty_config_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.yaml").write_text("")
    settings = settings_of(["--config", str(tmp_path / "empty.yaml")], monkeypatch)
    assert settings == Settings(device="cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_stesp: 5", r"unknown setting 'max_stesp'. Did you mean max_steps\?"),
        ("trainer: {callbacks: {grad_dmp: {}}}", r"unknown setting 'trainer.callbacks.grad_dmp'"),
        ("trainer: 5", "trainer should hold settings by name, but holds 5"),
        ("max_steps: many", "max_steps should be int, got 'many'"),
        ("max_steps: 1.5", "max_steps should be int, got 1.5"),
        ("batch_size: true", "batch_size should be int, got True"),
        ("learning_rate: fast", "learning_rate should be float, got 'fast'"),
        ("gradient_checkpointing: 1", "gradient_checkpointing should be bool, got 1"),
        ("method: Magic", "method should be GradDotProd, Regular, got 'Magic'"),
        ("data: [a, b]", "data should be str, got"),
        ("trainer: {callbacks: {watch: {sinks: [1]}}}", "sinks should be a list of names, got"),
        ("- 1", "should hold settings by name, but holds list"),
        ("a: [", "is not YAML"),
    ],
)
def test_wrong_config_files(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        app.parse_args(["--config", str(file)])


def test_config_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "config.json").write_text('{"settings": {"watch": {}}}')
    with pytest.raises(UsageError, match="a run that `gradsight train` did not make"):
        read_config(tmp_path / "config.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        read_config(tmp_path / "broken.json")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--max_itres", "3"], "Did you mean --max_iters?"),
        (["--trainer.callbacks.grad_dmp.enabled=true"], "--trainer.callbacks.grad_dump.enabled"),
        (["--method", "Magic"], 'Choose from: "GradDotProd", "Regular"'),
        (["--batch_size", "two"], "--batch_size"),
        (["--batch_size", "0"], "--batch_size must be 1 or more, got 0"),
        (["--grad_clip", "-1"], "--grad_clip must be 0 or more, got -1"),
        (["--learning_rate", "nan"], "--learning_rate must be 0 or more, got nan"),
        (["--model.dropout", "1"], "--model.dropout must be at least 0 and below 1"),
        (
            ["--experiment", "a/b"],
            "--experiment is the name of a folder inside --results_dir, got 'a/b'",
        ),
        (["--experiment", ".."], "--experiment is the name of a folder"),
        (["--architecture", "GPT2-Smal"], "Did you mean GPT2-Small?"),
        (["--num_processes", "0"], "--num_processes must be 1 or more, got 0"),
        (["--device", "cuda"], "--device cuda: this torch sees no GPU"),
        (["--resume"], "is not there. Start it without --resume"),
    ],
)
def test_wrong_options_exit_64(
    tokens: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", *tokens]) == 64
    assert message in capsys.readouterr().err
