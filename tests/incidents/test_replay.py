"""gradsight replay: what it prints, its exit codes, and whatever may be wrong with what it is
given.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsight
from gradsight.cli import main
from gradsight.store import incident_format
from incidents.faults import FAULTS, train

BUILD = """
import torch
from incidents.faults import mlp


def build():
    return mlp(), None


def wider():
    model = mlp()
    model[2] = torch.nn.Linear(9, 1)
    return model, None


def normalised():
    model = mlp()
    model.insert(1, torch.nn.BatchNorm1d(8))
    return model, None


def no_model():
    return 3, None


def raising():
    raise KeyError("lost")
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "model.py").write_text(BUILD)
    train(
        FAULTS["NaN in a sample"],
        lambda model, optimizer: watched(model, optimizer, folder / "batch", "batch"),
    )
    train(
        FAULTS["NaN in a sample"],
        lambda model, optimizer: watched(model, optimizer, folder / "plain", True),
    )
    return folder


def watched(model: Any, optimizer: Any, folder: Path, recorder: Any) -> Any:
    return gradsight.watch(model, optimizer, run_dir=folder, recorder=recorder)


@pytest.fixture
def incident(run_dir: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    shutil.copytree(run_dir / "batch" / "incidents", tmp_path / "incidents")
    return tmp_path / "incidents" / "step5-GS103"


def replayed(*tokens: object) -> int:
    return main(["replay", *map(str, tokens)])


def test_it_prints_what_was_found_and_finds_it_again(
    run_dir: Path, incident: Path, capsys: Any
) -> None:
    assert replayed(incident, "--build", f"{run_dir / 'model.py'}:build") == 2
    out = capsys.readouterr().out
    assert "step 5, GS103: NaN gradient: NaN in 4 of 4 parameters at step 5" in out
    assert out.count("sample '5-0-11' (row 11): gradient not finite, even as a batch of one") == 2
    assert out.endswith("❌ Reproduced: the same as was found in process.\n")
    assert max(map(len, out.splitlines())) <= 80
    assert "test_replay" not in out


def test_as_json(run_dir: Path, incident: Path, capsys: Any) -> None:
    assert replayed(incident, "--json", "--build", f"{run_dir / 'model.py'}:build") == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["code"], told["reproduced"], told["agrees"]) == (
        5,
        "GS103",
        True,
        True,
    )
    assert told["in_process"]["samples"][0]["row"] == told["replayed"]["samples"][0]["row"] == 11
    assert told["replayed"]["operation"]["operation"] == "input"


def test_without_a_model_it_says_what_is_known(incident: Path, run_dir: Path, capsys: Any) -> None:
    assert replayed(incident) == 0
    out = capsys.readouterr().out
    assert "gradient not finite, even as a batch of one" in out
    assert "Not run again: give the model with --build file.py:build." in out
    assert replayed(run_dir / "plain" / "incidents" / "step5-GS103") == 0
    assert (
        'Not run again: the batch was not written: watch with recorder="batch"'
        in capsys.readouterr().out
    )


def test_known_facts_need_no_torch(incident: Path) -> None:
    code = f"from gradsight.cli import main; main(['replay', {str(incident)!r}]); import sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "row 11" in done.stdout


def test_a_fault_that_is_gone_is_not_reproduced(run_dir: Path, incident: Path, capsys: Any) -> None:
    """The batch is mended: everything else is as it was."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(incident / "batch.safetensors")
    tensors = {
        name: each.nan_to_num() if each.is_floating_point() else each
        for name, each in tensors.items()
    }
    document = json.loads((incident / "incident.json").read_text())
    save_file(tensors, incident / "batch.safetensors")
    rewrite(incident, document)
    assert replayed(incident, "--build", f"{run_dir / 'model.py'}:build") == 0
    assert capsys.readouterr().out.endswith("⚠️ The fault did not come back.\n")


def rewrite(incident: Path, document: dict[str, Any], **changes: Any) -> None:
    """Sign a changed incident as the recorder would have."""
    body = document["incident"] | changes
    for name in body["files"]:
        file = incident / name
        body["files"][name] = {
            "bytes": file.stat().st_size,
            "crc32": zlib.crc32(file.read_bytes()),
        }
    document["crc32"], document["incident"] = incident_format.checksum_of(body), body
    (incident / "incident.json").write_text(json.dumps(document))


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def newer(incident: Path) -> None:
    document = json.loads((incident / "incident.json").read_text())
    (incident / "incident.json").write_text(json.dumps(document | {"version": 2}))


def foreign(incident: Path) -> None:
    (incident / "incident.json").write_text('{"step": 3}')


def reworded(incident: Path) -> None:
    text = (incident / "incident.json").read_text()
    (incident / "incident.json").write_text(text.replace('"step": 5', '"step": 6'))


def no_safetensors(incident: Path) -> None:
    """What a stranger might send: a pickle under the name of a safetensors file, properly signed."""
    document = json.loads((incident / "incident.json").read_text())
    (incident / "batch.safetensors").write_bytes(pickle.dumps(Trap(incident)))
    rewrite(incident, document)


class Trap:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / "sprung"),)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda incident: shorten(incident / "incident.json"), "incident.json is damaged: "),
        (lambda incident: shorten(incident / "batch.safetensors"), "batch.safetensors is damaged: it has "),
        (lambda incident: flip(incident / "batch.safetensors"), "batch.safetensors is damaged: its checksum does not fit"),
        (lambda incident: flip(incident / "parameters.safetensors"), "parameters.safetensors is damaged: its checksum"),
        (lambda incident: (incident / "batch.safetensors").unlink(), "is damaged: batch.safetensors is missing"),
        (lambda incident: (incident / "incident.json").unlink(), "is not an incident: it has no incident.json"),
        (shutil.rmtree, "there is no incident at "),
        (newer, "has format version 2, and this Gradsight reads version 1; read it with the Gradsight that wrote it"),
        (foreign, "incident.json is not an incident of Gradsight's"),
        (reworded, "incident.json is damaged: its checksum does not fit its text"),
        (no_safetensors, "batch.safetensors is damaged: "),
    ],
    ids=[
        "cut text", "cut batch", "flipped batch", "flipped parameters", "no batch", "no text", "no folder", "newer", "foreign",
        "reworded", "pickle",
    ],
)  # fmt: skip
def test_what_is_damaged_says_so(
    harm: Any, message: str, run_dir: Path, incident: Path, capsys: Any
) -> None:
    harm(incident)
    # A folder that is no incident is a wrong path; one that is damaged is a finding.
    code = 2 if "is damaged" in message else 64
    assert replayed(incident, "--build", f"{run_dir / 'model.py'}:build") == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not (incident / "sprung").exists()


def test_a_damaged_incident_does_not_hide_the_others(incident: Path, run_dir: Path) -> None:
    shutil.copytree(run_dir / "batch", incident.parents[1], dirs_exist_ok=True)
    shutil.copytree(incident, incident.with_name("step9-GS104"))
    shorten(incident / "incident.json")
    found = list(gradsight.open_run(incident.parents[1]).incidents())
    assert [(each.step, each.damage is None) for each in found] == [(5, False), (9, True)]
    assert "incident.json is damaged" in (found[0].damage or "")


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        (
            "wider",
            64,
            "this model is not the one of the incident: 2.weight is [1, 9] float32, and was [1, 8] float32",
        ),
        (
            "normalised",
            64,
            "this model is not the one of the incident: 2.weight is missing; 2.bias is missing; 1.weight was not",
        ),
        ("no_model", 64, "must return (model, batch), got a int as its model"),
        ("raising", 3, "raised KeyError: 'lost'"),
        ("absent", 64, "has no function 'absent'"),
    ],
)
def test_a_model_that_does_not_fit(
    function: str, code: int, message: str, run_dir: Path, incident: Path, capsys: Any
) -> None:
    assert replayed(incident, "--build", f"{run_dir / 'model.py'}:{function}") == code
    assert message in capsys.readouterr().err


def test_buffers_that_have_changed_since(tmp_path: Path, capsys: Any) -> None:
    """The code of the model has another buffer now than when the incident was written."""
    code = "import torch\nfrom torch import nn\n\n\ndef build():\n    model = nn.Linear(4, 1)\n    {}\n    return model, None\n"
    model = nn.Linear(4, 1)
    model.register_buffer("scale", torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer, run_dir=tmp_path, recorder="batch"):
        model(torch.full((2, 4), float("nan"))).sum().backward()
        optimizer.step()
    incident = tmp_path / "incidents" / "step0-GS103"
    for now, message in (
        ("", "scale is missing"),
        (
            "model.register_buffer('scale', torch.ones(2))",
            "scale is [2] float32, and was [3] float32",
        ),
        (
            "model.register_buffer('scale', torch.ones(3)); model.register_buffer('shift', torch.ones(1))",
            "shift was not there",
        ),
    ):
        (tmp_path / "now.py").write_text(code.format(now))
        assert replayed(incident, "--build", f"{tmp_path / 'now.py'}:build") == 64
        assert message in capsys.readouterr().err
    (tmp_path / "now.py").write_text(code.format("model.register_buffer('scale', torch.zeros(3))"))
    assert (
        replayed(incident, "--build", f"{tmp_path / 'now.py'}:build") == 2
    )  # other values are put right


def test_arguments_that_are_no_data(tmp_path: Path, capsys: Any) -> None:
    class Options:
        pass

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor, options: Options) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)

    model = Net(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer, run_dir=tmp_path, recorder="batch") as watch:
        model(torch.full((2, 4), float("nan")), Options()).sum().backward()
        optimizer.step()
        (finding,) = watch.report().findings
    assert finding.diagnosis is not None
    incident = tmp_path / "incidents" / "step0-GS103"
    assert not (incident / "batch.safetensors").exists()
    assert replayed(incident) == 0
    reason = "the batch cannot be stored: pass0.args.1 is a test_replay.test_arguments_that_are_no_data.<locals>.Options"
    out = " ".join(capsys.readouterr().out.split())
    assert reason.replace("test_replay", "incidents.test_replay") in out or reason in out
    assert replayed(incident, "--build", f"{__file__}:nothing") == 64
    assert "cannot be run again: the batch cannot be stored" in capsys.readouterr().err


def test_wrong_usage(incident: Path, capsys: Any) -> None:
    assert replayed(incident, "--diagnose_seconds", "0") == 64
    assert "--diagnose_seconds must be more than 0, got 0" in capsys.readouterr().err
    assert main(["replay"]) == 64
