"""Every command and every piece of Python in the README's tables works."""

import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import warm
from docs import pages
from docs.test_pages import README, environment

TABLES = "".join(line + "\n" for line in README.read_text().splitlines() if line.startswith("|"))
IN_TABLES = list(dict.fromkeys(re.findall(r"`([^`]+)`", TABLES)))
COMMANDS = [code for code in IN_TABLES if code.startswith("gradsight ")]
PYTHON = [code for code in IN_TABLES if re.search(r"\bgradsight\.", code)]

EXIT_CODES = {
    "gradsight report RUN": 2,
    "gradsight check --stop-on critical train.py": 2,
    "gradsight check train.py": 2,
}
"""The script of the quick start has a critical finding; other commands exit with 0."""
FOREVER = {"gradsight serve RUN"}
SLOW = ("gradsight preflight ", "gradsight run ", "gradsight check train", "gradsight memory ")
"""Commands that import torch or transformers in a new interpreter; other tests own them too."""

SCORED = """
import torch, gradsight
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
batch = (torch.randn(8, 4), torch.arange(8) % 2)
engine = gradsight.GhostEngine(model, loss_fn, batch, optimizer=optimizer, run_dir="scored")
dumper = gradsight.GradientDumper("scored")
for step in range(20):
    with engine.observe(sample_ids=range(8)):
        loss_fn(model, batch).backward()
    dumper.dump(model, step)
    optimizer.step()
    optimizer.zero_grad()
engine.close()
dumper.close()
"""
"""A run with scores and dumps, which the quick start does not make."""
CONFIG = """
{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
 "num_attention_heads": 2, "vocab_size": 100}
"""


def run(folder: Path, *args: object) -> subprocess.CompletedProcess[Any]:
    return warm.run(args, cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quick start's script and run, a scored run, and a model's configuration."""
    folder = tmp_path_factory.mktemp("readme")
    (script,) = [block for block in pages.blocks(README) if block.file == "train.py"]
    (folder / "train.py").write_text(script.text)
    (folder / "config.json").write_text(CONFIG)
    for args in (["train.py"], ["-c", SCORED]):
        done = run(folder, *args)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] if command.startswith(SLOW) else [])
        for command in COMMANDS
    ],
)
def test_every_command_of_the_table_works(command: str, folder: Path) -> None:
    needs_scores = command.startswith(("gradsight influence", "gradsight dump"))
    places = {"RUN": "scored" if needs_scores else "runs/first", "OTHER_RUN": "runs/first"}
    places["MODEL_DIR"] = "."
    args = [places.get(word, word) for word in command.split()[1:]]
    if command in FOREVER:
        with warm.Popen(
            ["-m", "gradsight", *args, "--port", "0"],
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout.readline().startswith("http://127.0.0.1:")
            process.send_signal(signal.SIGTERM)
        return
    done = run(folder, "-m", "gradsight", *args)
    expected = EXIT_CODES.get(command, 0)
    assert done.returncode == expected, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    "trainer", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "trainer"]
)
def test_every_piece_of_python_in_the_tables_works(trainer: bool, folder: Path) -> None:
    given, _ = (folder / "train.py").read_text().split("\nwith ")
    lines = [given]
    for code in PYTHON:
        if (".integrations." in code) == trainer:
            is_keyword = re.match(r"\w+=", code)
            lines.append(f"{code}; result = None" if is_keyword else f"result = {code}")
            lines.append("if type(result).__name__ == 'Watch': result.close()")
    assert len(lines) > 1
    done = run(folder, "-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr


def test_the_tables_answer_the_questions_that_readers_ask() -> None:
    """Without these lines the tests above would pass on an empty table."""
    for line in [
        "gradsight check --stop-on critical train.py",
        "gradsight explain GS201",
        "gradsight memory plan MODEL_DIR --lora r=16 --dtype bf16 --device cuda --budget 24GB",
    ]:
        assert line in COMMANDS
    for line in [
        'gradsight.watch(model, optimizer, health={"GS201": False})',
        'gradsight.open_run("runs/first").to_arrow("parameter_stats").to_pandas()',
        "gradsight.GhostEngine",
        'gradsight.watch(model, optimizer, dump=gradsight.GradientDumper("runs/third"))',
    ]:
        assert line in PYTHON
    assert "(docs/huggingface.md)" in TABLES
