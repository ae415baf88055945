"""gradsight verify: every file of a run that is not as it was written is named."""

import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import nn

import gradsight
from gradsight.cli import main
from gradsight.core import rundir
from gradsight.store.score_folder import write_scores
from gradsight.store.scores import ScoreFile, score_path
from gradsight.store.store import open_store
from gradsight.train.checkpoint import CheckpointFacts, write
from gradsight.values.scores import SavedScore
from store.crafted import fill


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a file of every kind."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dumper = gradsight.GradientDumper(run_dir, step_interval=2, asynchronous=False)
    with gradsight.watch(
        model, optimizer, run_dir=run_dir, dump=dumper, recorder="batch"
    ) as watched:
        for step in range(4):
            optimizer.zero_grad()
            value = float("nan") if step == 3 else 1.0
            loss = model(torch.full((2, 3), value)).sum()
            loss.backward()
            optimizer.step()
            watched.log(loss=loss.item())
    row = SavedScore(0, 1, "web", "t", 0.5, 0.1, 1.0, None, "plain")
    write_scores(score_path(run_dir, 10), [row], ScoreFile())
    write(run_dir, {"model/weight": torch.ones(3)}, CheckpointFacts(1, 2, 3.0, "data"), keep=2)
    (run_dir / rundir.TRAINING_LOG).write_text('[{"step": 1}]')
    return run_dir


@pytest.fixture
def run_dir(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def verify(run_dir: Path, *options: str) -> tuple[int, str]:
    before = {file: file.stat().st_mtime_ns for file in run_dir.rglob("*")}
    said = io.StringIO()
    with redirect_stdout(said):
        code = main(["verify", str(run_dir), *options])
    assert {file: file.stat().st_mtime_ns for file in run_dir.rglob("*")} == before
    return code, said.getvalue()


def test_what_is_whole_is_intact(run_dir: Path) -> None:
    code, said = verify(run_dir)
    assert (code, said.splitlines()[-1]) == (0, f"{run_dir}: all intact")
    assert "damaged" not in said


FILES = [
    "run.sqlite",
    "config.json",
    "grad_dotprods/iter_000010.parquet",
    "checkpoints/step_000001/tensors.safetensors",
    "checkpoints/step_000001/checkpoint.json",
    "gradient_dumper/step2/full_gradients/manifest.json",
    "gradient_dumper/step2/full_gradients/__0_0.distcp",
    "incidents/*/incident.json",
    "incidents/*/batch.safetensors",
    "incidents/*/parameters.safetensors",
]


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_named_with_its_file(name: str, run_dir: Path) -> None:
    file = next(run_dir.glob(name))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, said = verify(run_dir)
    place = file.relative_to(run_dir).as_posix()
    (line,) = [line for line in said.splitlines() if line.startswith("damaged: ")]
    # A dump and an incident are one thing of several files; what is wrong says which.
    assert line.removeprefix("damaged: ").startswith((place, str(Path(place).parent)))
    assert Path(place).name in line
    assert code == 2
    code, said = verify(run_dir, "--json")
    body = json.loads(said)
    assert code == 2
    assert (body["schema"], body["status"], len(body["damaged"])) == (1, "damaged", 1)
    assert body["damaged"][0].keys() == {"path", "what"}


def test_several_damaged_files_are_all_named(run_dir: Path) -> None:
    for name in ("config.json", "run.sqlite", "grad_dotprods/iter_000010.parquet"):
        file = run_dir / name
        file.write_bytes(file.read_bytes()[:-9])
    _, said = verify(run_dir)
    assert said.splitlines()[-1] == f"{run_dir}: 3 files damaged"


def test_a_killed_run_and_one_that_is_being_written(tmp_path: Path) -> None:
    store = open_store(tmp_path / "live")
    fill(store, range(5))
    assert verify(tmp_path / "live")[0] == 0
    killed = Path(shutil.copytree(tmp_path / "live", tmp_path / "killed"))
    tail = (killed / rundir.TAIL).read_bytes()
    (killed / rundir.TAIL).write_bytes(tail[:-5])
    store.close()
    code, said = verify(killed)
    assert code == 0
    assert "note: run.sqlite-tail ends inside of a frame: the run was killed" in said
    changed = bytearray(tail)
    changed[60] ^= 1
    (killed / rundir.TAIL).write_bytes(changed)
    code, said = verify(killed)
    assert code == 2
    assert "damaged: run.sqlite-tail: is damaged at byte" in said
    assert "steps from there on" in said
    # Both at once: one does not hide the other.
    (killed / rundir.RECORD).write_bytes(b"nonsense" * 100)
    assert verify(killed)[1].splitlines()[-1] == f"{killed}: 2 files damaged"


def test_files_without_a_checksum_are_named(run_dir: Path) -> None:
    config = json.loads((run_dir / "config.json").read_text())
    del config["checksum"], config["format"]
    (run_dir / "config.json").write_text(json.dumps(config))
    code, said = verify(run_dir)
    assert code == 0
    assert "note: config.json has no checksum" in said


def test_a_run_inside_of_a_run(run_dir: Path) -> None:
    inner = Path(shutil.copytree(run_dir, run_dir / "generator"))
    (inner / "config.json").write_bytes(b"{")
    assert "damaged: generator/config.json: " in verify(run_dir)[1]


def test_links_are_not_followed(run_dir: Path, tmp_path: Path) -> None:
    dumps = run_dir / rundir.DUMPS
    dumps.rename(tmp_path / "elsewhere")
    dumps.symlink_to(tmp_path / "elsewhere")
    code, said = verify(run_dir)
    assert code == 2
    assert "damaged: gradient_dumper: is a link" in said


@pytest.mark.parametrize("place", ["missing", "empty", "a file"])
def test_what_is_no_run_is_wrong_usage(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").write_text("text")
    assert main(["verify", str(tmp_path / place)]) == 64
    assert "gradsight: " in capsys.readouterr().err
    assert main(["verify", "--unheard"]) == 64


def test_it_answers_without_torch(run_dir: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from gradsight.cli import main; "
        "sys.exit(main(['verify', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run_dir)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
