"""One look at the gradients in place: the counts, the limits and the report of every row of the
table.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsight
from gradsight.errors import UsageError
from launch import run_ranks

RANKS = Path(__file__).with_name("one_look_ranks.py")


def with_gradients(*gradients: list[float] | None) -> nn.Module:
    """A model whose parameters have these gradients."""
    model = nn.Module()
    for index, values in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros(len(values or [0.0])))
        parameter.grad = None if values is None else torch.tensor(values)
        model.register_parameter(f"p{index}", parameter)
    return model


def codes(report: Any) -> list[str]:
    return [finding.code for finding in report.findings]


@pytest.mark.parametrize(
    ("norm", "status", "expected"),
    [
        (1.0, "healthy", []),
        (50.0, "healthy", []),
        (100.0, "healthy", []),
        (101.0, "warning", ["GS101"]),
        (999.0, "warning", ["GS101"]),
        (1001.0, "critical", ["GS102"]),
        (1e30, "critical", ["GS102"]),
        (0.05, "healthy", []),
        (0.0011, "healthy", []),
        (0.0009, "warning", ["GS105"]),
        (0.0, "critical", ["GS106"]),
        (math.nan, "critical", ["GS103"]),
        (math.inf, "critical", ["GS104"]),
    ],
)
def test_every_row_of_the_table(norm: float, status: str, expected: list[str]) -> None:
    report = gradsight.check_gradient_health(with_gradients([norm]), step=7)
    assert (report.status, codes(report)) == (status, expected)
    assert report.exit_code == {"healthy": 0, "warning": 1, "critical": 2}[status]


def test_counts_are_of_parameters_that_have_a_gradient() -> None:
    model = with_gradients([3.0, math.nan], [0.0, 0.0], [4.0], None, [math.inf, -math.inf, 1.0])
    report = gradsight.check_gradient_health(model, step=12)
    assert (report.nan_count, report.inf_count, report.zero_count, report.num_params) == (
        1,
        1,
        1,
        4,
    )
    assert math.isnan(report.total_norm)
    assert {"GS103", "GS104"} <= set(codes(report))
    assert report.findings[0].parameters == ("p0",)


def test_the_line_of_a_report() -> None:
    report = gradsight.check_gradient_health(with_gradients([3.0], [4.0], [0.0]), step=5)
    assert str(report) == "Step 5: grad_norm=5.0000, nan=0, zero=1"


def test_a_look_prints_the_parameters_with_a_nan_and_then_its_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gradients = [1.0], [math.nan, 1.0], [math.inf], None, [math.nan], [0.0]
    report = gradsight.check_gradient_health(with_gradients(*gradients), 3)
    assert capsys.readouterr().out.splitlines() == [
        "  NaN gradient in: p1",
        "  NaN gradient in: p4",
        "Step 3: grad_norm=nan, nan=2, zero=1",
    ]
    assert gradsight.check_gradient_health(with_gradients(*gradients), 3, quiet=True) is not report
    assert capsys.readouterr() == ("", "")


def test_a_report_can_be_read_by_four_keys() -> None:
    report = gradsight.check_gradient_health(with_gradients([3.0], [4.0], [0.0], None))
    assert report["total_norm"] == pytest.approx(5.0)
    assert (report["nan_count"], report["zero_count"], report["num_params"]) == (0, 1, 3)
    assert list(report.keys()) == ["total_norm", "nan_count", "zero_count", "num_params"]
    assert dict(report) == {key: getattr(report, key) for key in report}
    assert report
    with pytest.raises(
        KeyError, match="no key 'loss'; it has total_norm, nan_count, zero_count, num_params"
    ):
        report["loss"]
    assert report.get("inf_count") is None
    assert "findings" in report.to_dict()


def test_the_first_rank_alone_prints() -> None:
    lines = run_ranks(RANKS).splitlines()
    norm = f"{24**0.5:.4f}"
    assert sorted(lines) == [
        f"Step 0: grad_norm={norm}, nan=0, zero=0",
        f"Step 1: grad_norm={norm}, nan=0, zero=0",
        *[f"rank {rank} {kind}: {norm}" for rank in (0, 1) for kind in ("ddp", "fsdp")],
    ]


def test_more_than_half_zero_is_a_warning_and_half_is_none() -> None:
    assert codes(gradsight.check_gradient_health(with_gradients([1.0], [0.0], [0.0]))) == ["GS107"]
    assert codes(gradsight.check_gradient_health(with_gradients([1.0], [0.0]))) == []


def test_no_gradient_at_all_is_critical() -> None:
    report = gradsight.check_gradient_health(with_gradients(None, None))
    assert (report.status, codes(report), report.num_params) == ("critical", ["GS106"], 0)
    assert "no parameter has a gradient" in report.findings[0].evidence
    assert str(report) == "Step 0: no parameter has a gradient"
    assert "Zero-grad parameters" not in report.to_markdown()


def test_the_total_is_that_of_the_plain_loop() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))
    model(torch.randn(5, 7)).square().sum().backward()
    plain = (
        sum(float(parameter.grad.double().norm()) ** 2 for parameter in model.parameters()) ** 0.5
    )
    assert gradsight.check_gradient_health(model).total_norm == pytest.approx(plain, rel=1e-6)


def test_the_report_has_its_headings_and_is_json() -> None:
    report = gradsight.check_gradient_health(with_gradients([math.nan], [2000.0]), step=3)
    text = report.to_markdown()
    headings = [
        "## Gradient Health Report",
        "### Summary",
        "### Issues Detected",
        "### Recommendations",
        "### Code to Add",
    ]
    assert [line for line in text.splitlines() if line in headings] == headings
    assert "| Metric | Value | Status |" in text
    assert "| NaN parameters | 1 | ❌ |" in text
    assert "label_smoothing" in text
    read = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert read["total_norm"] == "nan"
    assert read["findings"][0]["code"] == "GS103"


def test_a_healthy_report_says_so() -> None:
    text = gradsight.check_gradient_health(with_gradients([1.0])).to_markdown()
    assert "| Total grad norm | 1 | ✅ |" in text
    assert "None needed." in text
    assert "Code to Add" not in text


def test_something_else_than_a_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"model must be a torch\.nn\.Module, got list"):
        gradsight.check_gradient_health([])
