"""What is found of a bad step where numbers come late: the guarantee, cell by cell."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gradsight
from device.clock import Speed
from device.late_faults import BAD, NAMES, ROW, Outcome, same, train
from device.simulated import simulated
from gradsight.cli.report import report

SKIP = {"on_finding": {"critical": "skip"}}
BATCH = {"recorder": "batch"}
WEIGHTS = "with the weights after the update"


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, foreach=True)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, fused=True)


def fused_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-3, momentum=0.9, fused=True)


def bad_run(
    born: str, run_dir: Path, optimizer: Any = foreach, speed: Speed = "slow", **watch: Any
) -> tuple[Outcome, Outcome]:
    """A watched run with one bad step, and the same unwatched."""
    with simulated(speed) as there:
        watched = train(born, there.device, run_dir, optimizer, **watch)
        alone = train(born, there.device, run_dir, optimizer, watched=False)
    assert all(map(torch.equal, watched.generators, alone.generators))
    assert watched.drains == []
    return watched, alone


def assert_explained(outcome: Outcome, operation: str) -> None:
    finding = outcome.finding()
    diagnosis = finding.diagnosis
    assert (finding.code, finding.first_step) == ("GS103", BAD)
    assert diagnosis.operation.operation == operation
    assert diagnosis.operation.module == "length"
    assert "guilty line" in diagnosis.operation.source
    assert [sample.sample_id for sample in diagnosis.samples] == [NAMES[ROW]]


@pytest.mark.parametrize("speed", ["slow", pytest.param(60, marks=pytest.mark.slow)])
def test_born_in_forward_it_is_known_before_the_update(speed: Speed, tmp_path: Path) -> None:
    watched, alone = bad_run("forward", tmp_path, speed=speed)
    assert_explained(watched, "log")
    assert same(watched.weights, alone.weights)
    assert same(watched.around[0], alone.around[0])


def test_born_in_backward_its_parameters_are_named_one_step_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched, alone = bad_run("backward", tmp_path)
    finding = watched.finding()
    assert (finding.code, finding.first_step) == ("GS103", BAD)
    assert finding.parameters[:2] == ("length.proj.weight", "first.weight")
    assert finding.diagnosis.operation is None
    assert finding.diagnosis.samples == ()
    assert same(watched.weights, alone.weights)
    report(tmp_path)
    capsys.readouterr()
    text = (tmp_path / "report.md").read_text()
    assert "on_finding" in text
    assert 'recorder="batch"' in text
    assert "Inf parameters | 0" in text


@pytest.mark.parametrize(
    "optimizer", [fused, pytest.param(fused_momentum, marks=pytest.mark.slow), foreach]
)
def test_skipped_all_is_found_and_weights_are_untouched(optimizer: Any, tmp_path: Path) -> None:
    watched, _ = bad_run("backward", tmp_path, optimizer, **SKIP)
    assert_explained(watched, "sqrt")
    assert same(*watched.around)
    assert [step.step for step in watched.run.steps() if step.skipped] == [BAD]
    said = [problem.message for problem in watched.run.problems()]
    assert len(said) == (optimizer is foreach)


def test_with_the_copy_all_is_found_and_training_is_what_it_was(tmp_path: Path) -> None:
    watched, alone = bad_run("backward", tmp_path, **BATCH)
    assert_explained(watched, "sqrt")
    assert same(watched.weights, alone.weights)
    incident = next(tmp_path.glob("incidents/step*"))
    assert incident.name == f"step{BAD}-GS103"
    from safetensors.torch import load_file

    kept = load_file(incident / "parameters.safetensors")
    assert all(bool(each.isfinite().all()) for each in kept.values())


@pytest.mark.parametrize(("watch", "exact"), [({}, False), (BATCH, True)])
def test_a_spike_names_its_samples(watch: Any, exact: bool, tmp_path: Path) -> None:
    watched, alone = bad_run("spike", tmp_path, **watch)
    finding = watched.finding()
    assert (finding.code, finding.first_step) == ("GS201", BAD)
    assert finding.diagnosis.samples[0].sample_id == NAMES[ROW]
    assert any(WEIGHTS in note for note in finding.diagnosis.notes) is not exact
    assert same(watched.weights, alone.weights)


def test_the_copy_goes_to_the_host_where_the_device_has_no_room(tmp_path: Path) -> None:
    with simulated() as there:
        there.free_bytes = 100
        outcome = train("backward", there.device, tmp_path, foreach, **BATCH)
    assert_explained(outcome, "sqrt")


@pytest.mark.parametrize("speed", ["slow", pytest.param("fast", marks=pytest.mark.slow)])
def test_dump_on_files_the_gradient_of_the_bad_step(speed: Speed, tmp_path: Path) -> None:
    dumper = gradsight.GradientDumper(tmp_path, start_step=10**6, dump_on="critical")
    right = gradsight.GradientDumper(tmp_path / "cpu", start_step=10**6, dump_on="critical")
    with simulated(speed) as there:
        train("backward", there.device, tmp_path, foreach, dropout=0.0, dump=dumper)
    train("backward", torch.device("cpu"), tmp_path / "cpu", foreach, dropout=0.0, dump=right)
    assert dumped(tmp_path) == pytest.approx(dumped(tmp_path / "cpu"), rel=1e-3, nan_ok=True)


def dumped(run_dir: Path) -> dict[str, float]:
    (folder,) = run_dir.glob("gradient_dumper/step*/full_gradients")
    assert folder.parent.name == f"step{BAD}"
    names = list(gradsight.get_checkpoint_metadata(folder).tensors)
    loaded = gradsight.load_keys(folder, names)
    return {name: float(each.norm()) for name, each in zip(names, loaded, strict=True)}


def test_dump_on_is_refused_where_there_is_no_room(tmp_path: Path) -> None:
    dumper = gradsight.GradientDumper(tmp_path, dump_on="critical")
    with simulated() as there:
        there.free_bytes = 100
        with pytest.raises(gradsight.GradsightError, match="copy of the gradient"):
            train("backward", there.device, tmp_path, foreach, dump=dumper)
