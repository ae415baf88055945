"""The example runs as its README says, and every piece of Python in the README works on what it
wrote.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradsight import get_checkpoint_metadata, load_keys
from gradsight.dump.folders import find_dumps
from gradsight.dump.verify import verify

EXAMPLE = Path(__file__).parents[2] / "examples" / "gradient_dumping"


def snippets(run: Path) -> list[str]:
    """The README's Python that reads dumps, on another run."""
    code = re.findall(r"```python\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    return [
        one.replace("/tmp/gradient_dumping_example", str(run))
        for one in code
        if "gradient_dumper/step2" in one
    ]


def test_the_example(tmp_path: Path, launch) -> None:
    """Full dumps under DDP, sampled ones under FSDP2; their first gradients agree up to the order
    of sums.
    """
    assert launch(EXAMPLE / "train.py", 2, "--run_dir", tmp_path, "--parallel", "ddp") == [0, 0]
    assert launch(
        EXAMPLE / "train.py", 2, "--run_dir", tmp_path, "--save_first_n", 100, "--steps", 3
    ) == [0, 0]
    folders = find_dumps(tmp_path)
    assert [(path.parent.name, path.name) for path in folders] == [
        ("step0", "full_gradients"),
        ("step0", "sampled_gradients"),
        ("step2", "full_gradients"),
        ("step2", "sampled_gradients"),
        ("step4", "full_gradients"),
    ]
    assert all(verify(folder).intact for folder in folders)
    names = list(get_checkpoint_metadata(folders[0]).tensors)
    assert names == list(get_checkpoint_metadata(folders[1]).tensors)
    for name, full, rows in zip(
        names, load_keys(folders[0], names), load_keys(folders[1], names), strict=True
    ):
        assert (full[:100] - rows).norm() <= 1e-5 * full.norm() + 1e-9, name
    code = snippets(tmp_path)
    assert len(code) == 2
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 2 ((256, 64), 'float32')" in done.stdout
    assert "torch.Size([100, 64])" in done.stdout


def test_the_script_names_the_example(tmp_path: Path) -> None:
    text = (EXAMPLE / "run.sh").read_text()
    assert text.count("train.py") == 2
    assert subprocess.run(["bash", "-n", EXAMPLE / "run.sh"]).returncode == 0


@pytest.mark.parametrize("name", ["README.md", "train.py"])
def test_the_lines_of_the_example_are_those_it_runs(name: str) -> None:
    text = (EXAMPLE / name).read_text()
    assert "dumper.dump(model, step)  # after backward, before clipping, on every rank" in text
