"""A diagnosis in words, at 80 columns."""

import math

import torch
from torch import nn

from gradsight.incidents.diagnosis.diagnose import DiagnosisOptions, diagnose
from gradsight.values.diagnoses import (
    NO_SINGLE_SAMPLE,
    Diagnosis,
    GuiltyOperation,
    GuiltySample,
    TensorSummary,
)
from gradsight.values.wording import diagnosis_lines
from incidents.diagnosis.capture import step
from incidents.diagnosis.faults import Body, Length, rows, squared


def test_operation_and_sample() -> None:
    given = TensorSummary((16, 10), "float32", 0, 0.98, 0, 0)
    operation = GuiltyOperation(
        "log", "forward", "head", "/home/me/loss.py:12", "return p.log()", (given,), 2
    )
    samples = (
        GuiltySample(7, None, 2, 0, 1834.2, 0.94),
        GuiltySample(1, "doc-9", 0, 1, 20.0, 0.04),
    )
    assert diagnosis_lines(Diagnosis(operation, samples, 0.31, micro_batches=4)) == [
        "log in loss.py:12 (`return p.log()`), module head, forward, micro-batch 2",
        "input 16x10 float32, 0 .. 0.98",
        "sample 7 of micro-batch 2 holds 94% of the squared norm (its norm: 1.83e+03);",
        "  next sample 'doc-9' (row 1 of micro-batch 0, rank 1), 4%",
    ]


def test_what_came_before_the_pass() -> None:
    found = TensorSummary((16, 4), "float32", -2.3, 2.6, 4, 0)
    came = GuiltyOperation(
        "input",
        "before",
        None,
        "/x/train.py:18",
        "out = model(x)",
        (found,),
        0,
        "argument x, row 7",
    )
    nan = GuiltySample(7, None, 0, 0, float("nan"), None)
    assert diagnosis_lines(Diagnosis(came, (nan,), 0.04)) == [
        "NaN in the model's input: argument x, row 7; called in train.py:18 (`out =",
        "  model(x)`)",
        "it holds 16x4 float32, -2.3 .. 2.6, 4 NaN",
        "sample 7: gradient not finite, even as a batch of one",
    ]
    weight = GuiltyOperation(
        "parameter", "before", "fc", None, None, (found,), 0, "fc.weight not finite before the pass"
    )
    assert diagnosis_lines(Diagnosis(weight, (), 0.04))[0] == "fc.weight not finite before the pass"


def test_the_loss_and_the_notes() -> None:
    loss = GuiltyOperation(
        "loss", "loss", None, "/x/train.py:20", "loss.backward()", (), 0, "likely log or div"
    )
    notes = (
        "the 5 s of the diagnosis were over while running micro-batch 1 again to find its samples",
        "b",
        "c",
        "d",
    )
    assert diagnosis_lines(
        Diagnosis(loss, (GuiltySample(3, None, 0, 0, 12.0, None),), 5.02, notes)
    ) == [
        "the loss, outside the model: train.py:20 (`loss.backward()`)",
        "likely log or div",
        "sample 3 has the largest gradient norm, 12",
        "note: the 5 s of the diagnosis were over while running micro-batch 1 again to",
        "  find its samples",
        "note: b",
        "note: c (1 more)",
        "diagnosed in 5.0 s",
    ]


def test_real_diagnoses_fit() -> None:
    torch.manual_seed(0)
    model = Body(nn.Sequential(Length()))
    passes, loss = step(model, [rows((11, 0.0))], squared)
    lines = diagnosis_lines(
        diagnose(model, passes, DiagnosisOptions(seconds=60, kind="nonfinite", loss_root=loss))
    )
    assert lines[0].startswith("sqrt in faults.py:")
    assert "sample 11: gradient not finite, even as a batch of one" in lines
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 7


def test_samples_are_not_named_where_none_stands_out() -> None:
    samples = tuple(GuiltySample(row, None, 0, 0, math.nan, None) for row in range(16))
    note = f"the gradients of all 32 samples are not finite: {NO_SINGLE_SAMPLE}"
    assert diagnosis_lines(Diagnosis(None, samples, 0.1, (note,)), 200) == [f"note: {note}"]
    assert diagnosis_lines(Diagnosis(None, samples, 0.1))[0].startswith("sample 0, ")
