"""A trainer small enough for tests, and what its runs left behind."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gradsight.cli import main

TINY = {
    "model.n_layer": 2,
    "model.n_embd": 16,
    "block_size": 16,
    "batch_size": 4,
    "max_steps": 4,
    "eval_samples": 4,
    "eval_interval": 2,
    "warmup_steps": 2,
    "val_batch_size": 2,
    "learning_rate": 0.01,
    "startup_report": False,
    "trainer.callbacks.ghost.self_check": False,  # it has its own tests; those of all combinations leave it on
}
DUMP = "trainer.callbacks.grad_dump"
GHOST = "trainer.callbacks.ghost"


def write_text(folder: Path) -> Path:
    """Three domains of text, each with its own words."""
    words = {
        "birds": "crow heron swift ",
        "metals": "iron copper zinc ",
        "rivers": "Rhine Elbe Oder ",
    }
    for domain, text in words.items():
        (folder / domain).mkdir(parents=True)
        for number in range(2):
            lines = [f"{domain} {number} {line} {text * (1 + line % 3)}" for line in range(60)]
            (folder / domain / f"{number}.txt").write_text("\n".join(lines))
    return folder


def options(**changes: Any) -> list[str]:
    """Command-line options of a tiny run; dots in names are written as double underscores."""
    values = TINY | {name.replace("__", "."): value for name, value in changes.items()}
    return [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in values.items()
    ]


def run(folder: Path, *flags: str, expect: int = 0, **changes: Any) -> Path:
    """Train in this process on the text in folder/text; the run's directory."""
    if not (folder / "text").exists():
        write_text(folder / "text")
    changes = {
        "data": folder / "text",
        "results_dir": folder / "Results",
        "experiment": "a",
    } | changes
    assert main(["train", *options(**changes), *flags]) == expect
    return folder / "Results" / str(changes["experiment"])


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint, by name."""
    files = (run_dir / "checkpoints").glob("step_*/tensors.safetensors")
    return load_file(max(files, key=lambda file: int(file.parent.name.removeprefix("step_"))))


def log(run_dir: Path) -> list[dict[str, Any]]:
    """training_log.json without the time."""
    entries = json.loads((run_dir / "training_log.json").read_text())
    return [
        {name: value for name, value in entry.items() if name != "seconds"} for entry in entries
    ]


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not bit for bit the same."""
    return [
        name
        for name in sorted(a.keys() | b.keys())
        if name not in a or name not in b or not torch.equal(a[name], b[name])
    ]
