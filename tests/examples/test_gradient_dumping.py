"""Seed 1, typed as it is written: the script, its files, and the ways to read them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors

import warm
from dump.dumps import find_dumps, is_intact
from examples.seed_lines import proves
from gradsight import get_checkpoint_metadata, load_keys
from launch import run_ranks

TREE = Path(__file__).parents[2]
EXAMPLE = TREE / "examples" / "gradient_dumping"
FLAGS = [
    "--trainer.callbacks.grad_dump.enabled=true",
    "--trainer.callbacks.grad_dump.start_step=0",
    "--trainer.callbacks.grad_dump.step_interval=10",
    "--trainer.callbacks.grad_dump.end_step=100",
    "--trainer.callbacks.grad_dump.save_first_n=100",
]
SMALL = [
    "--max_steps",
    "12",
    "--batch_size",
    "2",
    "--block_size",
    "16",
    "--model.n_layer",
    "1",
    "--model.n_embd",
    "32",
    "--startup_report",
    "false",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the example writes: the two commands of run.sh, on warm ranks."""
    folder = tmp_path_factory.mktemp("dumping")
    run_ranks(EXAMPLE / "train.py", "--run_dir", folder)
    run_ranks(EXAMPLE / "train.py", "--run_dir", folder, "--save_first_n", 100, "--steps", 3)
    return folder


def snippets(run: Path) -> Iterator[str]:
    """The README's Python that reads dumps, on another run."""
    for code in re.findall(r"```python\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL):
        if "gradient_dumper/step2" in code:
            yield code.replace("/tmp/gradient_dumping_example", str(run))


@proves(1, "`bash src/examples/gradient_dumping/run.sh`")
@proves(1, "`src/examples/gradient_dumping/train.py` dumps every two steps on several ranks")
@proves(1, "`step0/`, `step2/`, ... under `gradient_dumper/`")
@pytest.mark.slow
def test_the_script_dumps_every_two_steps(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "src/examples/gradient_dumping/run.sh"],
        cwd=TREE,
        env={**os.environ, "PATH": path, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "gradient_dumping_example"
    folders = find_dumps(run)
    assert [(path.parent.name, path.name) for path in folders] == [
        ("step0", "full_gradients"),
        ("step0", "sampled_gradients"),
        ("step2", "full_gradients"),
        ("step2", "sampled_gradients"),
        ("step4", "full_gradients"),
    ]
    assert all(is_intact(folder) for folder in folders)
    assert (TREE / "src/examples/gradient_dumping/train.py").samefile(EXAMPLE / "train.py")


@proves(1, "`full_gradients/` is the default, a distributed checkpoint, each rank its shard")
@proves(1, "`.metadata`, `__0_0.distcp`, ...", "as written, and `manifest.json` with checksums")
def test_each_rank_writes_its_shard(run: Path) -> None:
    names = {file.name for file in (run / "gradient_dumper/step0/full_gradients").iterdir()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"}
    assert get_checkpoint_metadata(run / "gradient_dumper/step0/full_gradients").world_size == 2


@proves(1, "`sampled_gradients/`: the first N rows, one `.safetensors` per parameter, from rank 0")
@proves(1, "`embedding.weight_first100.safetensors`, key `gradient`")
def test_a_sampled_file_carries_the_number_that_was_asked_for(run: Path) -> None:
    folder = run / "gradient_dumper/step2/sampled_gradients"
    names = list(get_checkpoint_metadata(folder).tensors)
    expected = {f"{name}_first100.safetensors" for name in names} | {"manifest.json"}
    assert {file.name for file in folder.iterdir()} == expected
    # The norm's weight has 64 entries: its file keeps all, the manifest says how many there are.
    file = folder / "blocks.0.norm1.weight_first100.safetensors"
    with safetensors.safe_open(file, framework="pt") as opened:
        assert opened.get_tensor("gradient").shape == (64,)
    assert get_checkpoint_metadata(folder).tensors["blocks.0.norm1.weight"][0] == (64,)


@proves(1, "the sampled rows are those of the full gradient")
def test_the_rows_are_those_of_the_full_gradient(run: Path) -> None:
    full = run / "gradient_dumper/step0/full_gradients"
    sampled = run / "gradient_dumper/step0/sampled_gradients"
    names = list(get_checkpoint_metadata(full).tensors)
    assert names == list(get_checkpoint_metadata(sampled).tensors)
    for name, whole, rows in zip(
        names, load_keys(full, names), load_keys(sampled, names), strict=True
    ):
        assert (whole[:100] - rows).norm() <= 1e-5 * whole.norm() + 1e-9, name


@proves(
    1,
    "`from olmo_core.distributed.checkpoint import get_checkpoint_metadata, load_keys`",
    "`from gradsight import get_checkpoint_metadata, load_keys`: the package has its own name",
)
@proves(1, '`next(load_keys(full_dir, ["embedding.weight"]))`, its shape and norm')
@proves(1, '`safe_open(...)`, `get_tensor("gradient")`, its shape and norm')
@proves(1, "`load_keys()` runs in plain Python, outside `torchrun`", "as written, and no pickle")
def test_both_kinds_are_read_as_the_page_says(run: Path) -> None:
    code = "\n".join(snippets(run))
    done = warm.run(["-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 2 ((256, 64), 'float32')" in done.stdout
    assert "torch.Size([256, 64])" in done.stdout
    assert "torch.Size([100, 64])" in done.stdout


@proves(1, "`--trainer.callbacks.grad_dump.enabled`, `.start_step`, `.step_interval`, `.end_step`")
@proves(1, "`--trainer.callbacks.grad_dump.save_first_n` chooses between the two kinds")
def test_the_flags_of_a_training_script(tmp_path: Path) -> None:
    command = ["-m", "gradsight", "train", "--experiment", "mine", *FLAGS, *SMALL]
    done = warm.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folders = find_dumps(tmp_path / "Results" / "mine")
    assert [(path.parent.name, path.name) for path in folders] == [
        ("step0", "sampled_gradients"),
        ("step10", "sampled_gradients"),
    ]


@proves(
    1,
    "see also `gradient_dumper.py`, `distributed/checkpoint/`",
    "`src/gradsight/dump/dumper.py` and `dump/reader.py`: parts are named by instrument",
)
def test_the_code_is_where_the_table_says() -> None:
    assert (TREE / "src/gradsight/dump/dumper.py").is_file()
    assert (TREE / "src/gradsight/dump/reader.py").is_file()


@pytest.mark.parametrize("name", ["README.md", "train.py"])
def test_the_lines_of_the_example_are_those_it_runs(name: str) -> None:
    text = (EXAMPLE / name).read_text()
    assert "dumper.dump(model, step)  # after backward, before clipping, on every rank" in text
