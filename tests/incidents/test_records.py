"""Diagnoses as records: stored and read back, several ranks' as one, put into words."""

import json
import math
from collections import UserDict
from pathlib import Path

import pytest
import torch

import gradsight
from gradsight.core.calls import RecordedCall
from gradsight.incidents.arguments import CannotStore, pack_passes, unpack_passes
from gradsight.store.diagnoses import merge_diagnoses, unpack_diagnosis
from gradsight.values.diagnoses import Diagnosis, GuiltyOperation, GuiltySample, TensorSummary
from gradsight.values.plain import plain
from incidents.faults import mlp

SUMMARY = TensorSummary((2, 3), "float32", None, 1.5, 1, 0)
OPERATION = GuiltyOperation(
    "log", "forward", "head", "train.py:3", "torch.log(x)", (SUMMARY,), 1, "", 1
)


def samples(rank: int, *norms: float) -> tuple[GuiltySample, ...]:
    total = sum(norm**2 for norm in norms)
    return tuple(
        GuiltySample(row, None, 0, rank, norm, norm**2 / total) for row, norm in enumerate(norms)
    )


def test_a_diagnosis_survives_json() -> None:
    broken = GuiltySample(3, "doc", 1, 1, math.inf, None)
    diagnosis = Diagnosis(OPERATION, (broken, *samples(0, 1.0)), 0.5, ("a note",), 4)
    assert unpack_diagnosis(json.loads(json.dumps(plain(diagnosis), allow_nan=False))) == diagnosis
    assert unpack_diagnosis(plain(None)) is None


def test_shares_of_ranks_become_shares_of_all() -> None:
    merged = merge_diagnoses(
        [Diagnosis(None, samples(0, 3.0, 1.0), 1.0), Diagnosis(None, samples(1, 4.0, 2.0), 2.0)]
    )
    assert merged is not None
    assert [(sample.rank, sample.norm, sample.share) for sample in merged.samples] == [
        (1, 4.0, pytest.approx(16 / 30)),
        (0, 3.0, pytest.approx(9 / 30)),
        (1, 2.0, pytest.approx(4 / 30)),
        (0, 1.0, pytest.approx(1 / 30)),
    ]
    assert merged.seconds == 2.0


def test_what_one_rank_found_is_not_drowned_by_the_others() -> None:
    innocent = Diagnosis(None, samples(0, 3.0, 1.0), 1.0, ("everything was finite",))
    guilty = Diagnosis(OPERATION, (GuiltySample(5, None, 1, 1, math.nan, None),), 2.0)
    assert merge_diagnoses([innocent, guilty]) is guilty
    assert merge_diagnoses([]) is None


def test_arguments_survive_as_data() -> None:
    kwargs = {
        "scale": math.inf,
        "shape": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "mask": None,
    }
    given = (
        [torch.arange(3), {"encoded": UserDict(ids=[1])}, {"deep": (1.5, "text", True)}],
        torch.randn(2, 2).t(),
    )
    one = RecordedCall(
        given,
        kwargs,
        {"cpu": torch.get_rng_state()},
        {},
        ("cpu", "bfloat16"),
        True,
        "a.py:1",
        (torch.ones(2), None),
    )
    structure, tensors = pack_passes([one])
    (again,) = unpack_passes(json.loads(json.dumps(structure, allow_nan=False)), tensors)
    assert again.kwargs == {**kwargs, "shape": (2, 3)}
    assert torch.equal(again.args[0][0], torch.arange(3))
    assert again.args[0][1:] == [{"encoded": {"ids": [1]}}, {"deep": (1.5, "text", True)}]
    assert torch.equal(again.args[1], given[1])
    assert again.output_gradients is not None
    assert again.output_gradients[1] is None
    assert (again.autocast, again.training, again.caller) == (("cpu", "bfloat16"), True, "a.py:1")


def test_what_is_no_data_is_refused_by_name() -> None:
    one = RecordedCall(([{"x": {1, 2}}],), {}, {}, {}, None, True, None)
    with pytest.raises(CannotStore, match=r"^pass0\.args\.0\.0\.x is a builtins\.set$"):
        pack_passes([one])


def test_without_a_judge_endings_are_still_kept(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(RuntimeError),
        gradsight.watch(model, optimizer, run_dir=tmp_path, health=False),
    ):
        model(torch.full((2, 4), math.nan)).sum().backward()
        optimizer.step()
        model(torch.randn(2, 3))
    (incident,) = gradsight.open_run(tmp_path).incidents()
    assert (incident.step, incident.code, incident.diagnosis) == (1, "exception", None)
    assert incident.reason.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_a_bad_gradient_that_the_user_drops_is_no_incident(tmp_path: Path) -> None:
    """The user's guard clears it, and the step is made with a good one, even after the judge has
    found another.
    """
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with gradsight.watch(model, optimizer, run_dir=tmp_path, recorder="batch"):
        for step in range(8):
            if step == 5:
                model(torch.full((2, 4), math.nan)).sum().backward()
                optimizer.zero_grad()
            model(torch.full((2, 4), math.nan) if step == 2 else torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter, weight in zip(model.parameters(), weights, strict=True):
                    parameter.copy_(weight)
    assert [incident.step for incident in gradsight.open_run(tmp_path).incidents()] == [2]
    assert [folder.name for folder in (tmp_path / "incidents").iterdir()] == ["step2-GS103"]
