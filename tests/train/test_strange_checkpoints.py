"""Damaged, crafted and missing checkpoints: gone back from, or refused in words."""

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import gradsight
from gradsight.cli import main
from gradsight.core.documents import document_text, load_document
from gradsight.errors import UsageError
from gradsight.train.batches import Batch
from gradsight.train.checkpoint import verify_checkpoints
from gradsight.train.config import from_dict
from gradsight.train.processes import Processes
from gradsight.train.run import build, run_training
from gradsight.train.training_state import Trained, load_newest
from train.small import differing, options, run, weights, write_text

SIX = {"method": "Regular", "max_steps": 6, "checkpoint_interval": 2, "keep_checkpoints": 2}
Spoil = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps, with the checkpoints of steps 4 and 6."""
    return run(tmp_path_factory.mktemp("whole"), **SIX)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "Results" / "b"))


def resume(place: Path, *more: str) -> int:
    return main(
        ["train", "--resume", "--results_dir", str(place.parent), "--experiment", place.name, *more]
    )


def rewrite(folder: Path, **changes: Any) -> None:
    """Change the facts of a checkpoint as whoever made it could, checksums and all."""
    file = folder / "checkpoint.json"
    facts = load_document(file.read_bytes(), "") | changes
    if "tensors" not in changes:
        data = (folder / "tensors.safetensors").read_bytes()
        facts["tensors"] = {"bytes": len(data), "checksum": f"crc32:{zlib.crc32(data):08x}"}
    file.write_text(document_text(facts))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "tensors.safetensors")


def put(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "tensors.safetensors")
    rewrite(folder)


def without(prefix: str) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = tensors_of(folder)
        assert any(name.startswith(prefix) for name in tensors)
        put(folder, {k: v for k, v in tensors.items() if not k.startswith(prefix)})

    return spoil


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = tensors_of(folder)
        put(folder, tensors | {name: change(tensors[name]).contiguous()})

    return spoil


def facts(**values: Any) -> Spoil:
    return lambda folder: rewrite(folder, **values)


def replaced(name: str, content: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content) and None


def linked(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        aside = folder.parent.parent / "aside"
        shutil.move(folder / name, aside)
        (folder / name).symlink_to(aside)

    return spoil


def fifo(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoil


def huge(folder: Path) -> None:
    os.truncate(folder / "tensors.safetensors", 1 << 33)


WEIGHT = "transformer.ln_f.weight"
SPOILED: dict[str, Spoil] = {
    "no optimizer state": without("optimizer/"),
    "half an optimizer state": without(f"optimizer/{WEIGHT}/exp_avg_sq"),
    "no random state": without("rng/"),
    "a moment in bfloat16": changed(f"optimizer/{WEIGHT}/exp_avg_sq", torch.Tensor.bfloat16),
    "a moment of another shape": changed(f"optimizer/{WEIGHT}/exp_avg", lambda t: t[1:]),
    "a count of steps in pieces": changed(f"optimizer/{WEIGHT}/step", lambda t: t.repeat(3)),
    "another count of steps": changed(f"optimizer/{WEIGHT}/step", lambda t: t * 1e9),
    "a random state in floats": changed("rng/0/cpu", torch.Tensor.float),
    "a short random state": changed("rng/0/cpu", lambda t: t[:16]),
    "a random state of nonsense": changed("rng/0/cpu", lambda t: t * 0 + 255),
    "a tensor of nothing": lambda folder: put(
        folder, tensors_of(folder) | {"secret": torch.ones(1)}
    ),
    "a step of 10**9": facts(step=10**9),
    "a step below 0": facts(step=-1),
    "a step that is text": facts(step="6"),
    "a step that is a switch": facts(step=True),
    "a position without end": facts(position=10**30),
    "a position that is a list": facts(position=[6]),
    "seconds that are none": facts(seconds=float("nan")),
    "data that is no text": facts(data={"a": 1}),
    "processes without end": facts(processes=10**18),
    "checksums that are a list": facts(tensors=[1]),
    "facts that are a list": replaced("checkpoint.json", b"[1]"),
    "facts that are no JSON": replaced("checkpoint.json", b"\xff{"),
    "deep facts": replaced("checkpoint.json", b"[" * 100_000),
    "no facts": lambda folder: (folder / "checkpoint.json").unlink(),
    "no tensors": lambda folder: (folder / "tensors.safetensors").unlink(),
    "linked facts": linked("checkpoint.json"),
    "linked tensors": linked("tensors.safetensors"),
    "a pipe for facts": fifo("checkpoint.json"),
    "a pipe for tensors": fifo("tensors.safetensors"),
    "tensors of 8 GiB": huge,
}
OTHER_MODEL: dict[str, Spoil] = {
    "a weight too few": without(f"model/{WEIGHT}"),
    "a weight of another shape": changed(f"model/{WEIGHT}", lambda t: t.reshape(4, 4)),
    "a weight of another type": changed(f"model/{WEIGHT}", torch.Tensor.double),
    "a weight too many": lambda folder: put(
        folder, tensors_of(folder) | {"model/other": torch.ones(1)}
    ),
}


@pytest.fixture(scope="module")
def built(whole: Path) -> tuple[Trained, Processes]:
    """A model as that of the run, its optimizer, and this process."""
    settings = from_dict(gradsight.open_run(whole).config["settings"]["train"], "here")
    processes = Processes("cpu")
    return Trained(*build(settings, processes)), processes


@pytest.mark.parametrize("what", SPOILED)
def test_a_checkpoint_of_nonsense_is_gone_back_from(
    what: str, copy: Path, built: tuple[Trained, Processes]
) -> None:
    SPOILED[what](copy / "checkpoints" / "step_000006")
    facts, (damage,) = load_newest(copy, *built)
    assert facts.step == 4
    assert damage.path == "checkpoints/step_000006"
    assert damage.what.startswith("the checkpoint step_000006 is damaged and cannot be read: ")
    held = next(iter(built[0].optimizer.state.values()))
    assert held["step"].item() == 4, "the optimizer is as far as the model"


@pytest.mark.parametrize("what", OTHER_MODEL)
def test_a_checkpoint_of_another_model_is_refused(
    what: str, copy: Path, built: tuple[Trained, Processes]
) -> None:
    OTHER_MODEL[what](copy / "checkpoints" / "step_000006")
    with pytest.raises(UsageError, match="the checkpoint step_000006 is of another model"):
        load_newest(copy, *built)


def test_a_run_that_went_back_ends_as_if_nothing_had_been(
    whole: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SPOILED["no optimizer state"](copy / "checkpoints" / "step_000006")
    with pytest.warns(UserWarning, match=r"step_000006 is damaged.*Going back to the one of step_"):
        assert resume(copy) == 0
    assert "Resuming after step 4" in capsys.readouterr().out
    assert differing(weights(whole), weights(copy)) == []


def test_no_intact_checkpoint_is_an_error_that_names_them_all(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("step_000004", "step_000006"):
        file = copy / "checkpoints" / name / "tensors.safetensors"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    assert resume(copy) == 2
    said = capsys.readouterr().err
    assert "the checkpoint step_000006 is damaged" in said
    assert "the checkpoint step_000004 is damaged" in said
    assert main(["verify", str(copy)]) == 2
    shown = capsys.readouterr().out
    assert "damaged: checkpoints/step_000006/tensors.safetensors: its checksum is " in shown
    assert [damage.path for damage in verify_checkpoints(copy)] == [
        "checkpoints/step_000004/tensors.safetensors",
        "checkpoints/step_000006/tensors.safetensors",
    ]


def test_every_flipped_byte_is_noticed(copy: Path) -> None:
    chance = random.Random(0)
    assert verify_checkpoints(copy) == []
    for name in ("tensors.safetensors", "checkpoint.json"):
        file = copy / "checkpoints" / "step_000006" / name
        intact = file.read_bytes()
        for _ in range(60):
            data = bytearray(intact)
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            file.write_bytes(data)
            found = verify_checkpoints(copy)
            # JSON has more than one way to write the same: such a flip changes nothing.
            if not found:
                assert name == "checkpoint.json"
                assert load_document(bytes(data), "") == load_document(intact, "")
        file.write_bytes(intact)
    (copy / "training_log.json").write_text('[{"loss": 1}]')
    (damage,) = verify_checkpoints(copy)
    assert (damage.path, "an entry has no step" in damage.what) == ("training_log.json", True)


def test_checkpoints_from_before_there_were_checksums(
    whole: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("step_000004", "step_000006"):
        file = copy / "checkpoints" / name / "checkpoint.json"
        known = load_document(file.read_bytes(), "")
        old = {name: known[name] for name in ("step", "position", "seconds", "data")}
        file.write_text(json.dumps(old, indent=1))
    assert verify_checkpoints(copy) == []
    assert main(["verify", str(copy)]) == 0
    assert "step_000006 has no checksums" in capsys.readouterr().out
    assert resume(copy, "--max_steps", "7") == 0
    assert "Resuming after step 6" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--resume", None])
def test_a_run_that_left_no_checkpoint_is_begun_again(
    flag: str | None, whole: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints" / "partial_step_000002").mkdir(parents=True)
    (copy / "report.md").unlink()
    (copy / "leftover").write_text("of the run that is replaced")
    data = ["--data", str(whole.parent.parent / "text")]
    common = [f"--results_dir={copy.parent}", "--experiment=b", *data, *options(**SIX)]
    assert main(["train", *([flag] if flag else []), *common]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{copy} has no checkpoint yet: training starts from the beginning" in said
    assert differing(weights(whole), weights(copy)) == []
    assert not (copy / "leftover").exists()
    assert len(list(gradsight.open_run(copy).steps())) == 6


def test_what_is_no_broken_off_training_is_not_begun_again(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished one, and one beside which somebody keeps checkpoints of their own."""
    common = [f"--results_dir={copy.parent}", "--experiment=b"]
    shutil.rmtree(copy / "checkpoints")
    assert main(["train", *common]) == 64
    assert "holds a run already" in capsys.readouterr().err
    assert resume(copy) == 64
    (copy / "report.md").unlink()
    (copy / "checkpoints").mkdir()
    (copy / "checkpoints" / "epoch_1.pt").write_text("mine")
    assert main(["train", *common]) == 64
    assert (copy / "checkpoints" / "epoch_1.pt").read_text() == "mine"


def test_a_run_that_is_being_trained_is_not_replaced(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hold = (
        "import fcntl, os, sys; h = os.open(sys.argv[1], os.O_RDONLY); "
        "fcntl.flock(h, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(copy)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        other.stdout.readline()
        text = str(copy.parents[1] / "text")
        write_text(Path(text))
        common = [f"--results_dir={copy.parent}", "--experiment=b", f"--data={text}"]
        assert main(["train", "--overwrite", *common, *options(**SIX)]) == 64
        other.communicate()
    assert "another process is training into" in capsys.readouterr().err
    assert (copy / "checkpoints" / "step_000006" / "checkpoint.json").is_file()


@pytest.mark.parametrize("inner", [False, True])
def test_links_to_other_runs_are_refused_and_nothing_is_removed(
    inner: bool, whole: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`checkpoints` itself, or the oldest checkpoint in it, which is pruned as a link alone."""
    other = copy.parent / "other"
    shutil.copytree(whole, other)
    if inner:
        shutil.rmtree(copy / "checkpoints" / "step_000004")
        (copy / "checkpoints" / "step_000004").symlink_to(other / "checkpoints" / "step_000004")
        assert resume(copy, "--max_steps", "8") == 0
        assert [path.name for path in sorted((copy / "checkpoints").iterdir())] == [
            "step_000006",
            "step_000008",
        ]
    else:
        shutil.rmtree(copy / "checkpoints")
        (copy / "checkpoints").symlink_to(other / "checkpoints")
        assert resume(copy, "--max_steps", "8") == 64
        assert "is behind a link" in capsys.readouterr().err
    assert [path.name for path in sorted((other / "checkpoints").iterdir())] == [
        "step_000004",
        "step_000006",
    ]
    assert verify_checkpoints(other) == []


@pytest.mark.parametrize("mask", [0o077, 0o002])
def test_checkpoints_have_the_mode_that_the_user_gives_to_files(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        place = run(tmp_path, method="Regular", max_steps=1)
    finally:
        os.umask(before)
    for file in (place / "checkpoints" / "step_000001").iterdir():
        assert file.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_disk_without_room_ends_no_training(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the second step on no file may grow: neither record, nor checkpoint, nor report."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk(step: int, batch: Batch) -> Batch:
        if step == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        return batch

    settings = from_dict(gradsight.open_run(whole).config["settings"]["train"], "here")
    settings = replace(settings, results_dir=str(tmp_path / "Results"))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert run_training(settings, on_batch=fill_the_disk) == 0
            said = " ".join(str(one.message) for one in caught)
            shown = capsys.readouterr().out
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "run.sqlite cannot be written" in said
    assert "step_000002 cannot be written" in said
    assert "6 steps in" in shown
    assert "There is no report: " in shown
    assert list((tmp_path / "Results" / "a" / "checkpoints").iterdir()) == []
