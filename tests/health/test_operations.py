"""Advice for the operation that a gradient or a loss is not finite because of."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradsight.health.operations import (
    BY_OPERATION,
    DATA,
    HALF,
    OPERAND,
    OVERFLOW,
    POWER,
    advice_of,
)
from gradsight.health.registry import Advice
from gradsight.values.diagnoses import (
    BROKEN_OPERAND,
    Diagnosis,
    GuiltyOperation,
    TensorSummary,
)
from gradsight.values.findings import Finding
from health.test_fixes import sections

ALL = [DATA, OPERAND, HALF, OVERFLOW, *dict.fromkeys(BY_OPERATION.values())]
ZEROS = torch.zeros(3, 4)
NO_MASK = torch.zeros(3, 4, dtype=torch.bool)
AT: dict[str, tuple[tuple[Tensor, ...], tuple[Any, ...]]] = {
    "safe_log": ((ZEROS - 1,), ()),
    "masked_mean": ((ZEROS,), (NO_MASK,)),
    "safe_divide": ((ZEROS, ZEROS), ()),
    "safe_sqrt": ((ZEROS,), ()),
    "safe_norm": ((ZEROS,), ()),
    "safe_pow": ((ZEROS,), (0.5,)),
    "safe_std": ((ZEROS,), ()),
    "normalised": ((ZEROS,), (-1,)),
    "safe_exp": ((ZEROS + 1000,), ()),
    "safe_acos": ((ZEROS + 1,), ()),
    "safe_asin": ((ZEROS - 1,), ()),
    "safe_atan2": ((ZEROS, ZEROS), ()),
}
"""By function: arguments where what it replaces, or its derivative, is not finite."""


def functions_of(advice: Advice) -> dict[str, Any]:
    """The functions that a fix defines."""
    names: dict[str, Any] = {"torch": torch, "F": functional}
    code = sections(advice.tidy().fix).get("before the loop", "")
    if "def " not in code:
        return {}
    exec(code.replace("model.float()", ""), names)
    return {name: names[name] for name in names if name in AT}


def finding(code: str = "GS103", **facts: Any) -> Finding:
    """A finding that comes from an operation."""
    given = {"phase": "forward", "inputs": (), "detail": "", **facts}
    operation = GuiltyOperation(module=None, place=None, source=None, micro_batch=0, **given)
    diagnosis = Diagnosis(operation, (), 0.0)
    return Finding(code, "", "critical", (), 0, "", "", "general", "", diagnosis=diagnosis)


def test_every_function_of_the_fixes_is_tried() -> None:
    assert {name for advice in ALL for name in functions_of(advice)} == set(AT)


@pytest.mark.parametrize("name", AT)
def test_a_function_and_its_derivative_are_finite(name: str) -> None:
    function = next(known[name] for known in map(functions_of, ALL) if name in known)
    tensors, others = AT[name]
    given = [each.clone().requires_grad_() for each in tensors]
    result = function(*given, *others)
    assert result.isfinite().all()
    for gradient in torch.autograd.grad(result.sum(), given):
        assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("name", "plain", "at"),
    [
        ("safe_log", torch.log, (2.0,)),
        ("safe_divide", torch.div, (3.0, -2.0)),
        ("safe_sqrt", torch.sqrt, (2.0,)),
        ("safe_exp", torch.exp, (2.0,)),
        ("safe_acos", torch.acos, (0.3,)),
        ("safe_asin", torch.asin, (-0.3,)),
        ("safe_atan2", torch.atan2, (1.0, -2.0)),
    ],
)
def test_elsewhere_a_function_is_what_it_replaces(name: str, plain: Any, at: Any) -> None:
    function = next(known[name] for known in map(functions_of, ALL) if name in known)
    given = [torch.tensor(each) for each in at]
    torch.testing.assert_close(function(*given), plain(*given))


@pytest.mark.parametrize("advice", ALL, ids=lambda advice: advice.recommendation[:30])
def test_the_code_fits_the_terminal(advice: Advice) -> None:
    lines = advice.tidy().fix.splitlines()
    assert [line for line in lines if len(line) > 74] == []


@pytest.mark.parametrize(("operation", "advice"), BY_OPERATION.items())
def test_the_operation_decides(operation: str, advice: Advice) -> None:
    for code in ("GS103", "GS104", "GS109"):
        assert advice_of(finding(code, operation=operation)) is advice


def test_what_is_not_an_operation_has_advice_too() -> None:
    half = TensorSummary((2,), "float16", 0.0, 6e4, 0, 0)
    assert advice_of(finding(operation="input", phase="before")) is DATA
    assert advice_of(finding(operation="mse_loss", detail=f"x {BROKEN_OPERAND}")) is OPERAND
    assert advice_of(finding(operation="div", detail=f"x {BROKEN_OPERAND}")) is OPERAND
    assert advice_of(finding(operation="to(float16)")) is HALF
    assert advice_of(finding(operation="mm", inputs=(half,))) is HALF


def test_elsewhere_the_general_advice_stays() -> None:
    assert advice_of(finding(operation="lgamma")) is None
    assert advice_of(finding(operation="mul", detail=f"likely: ...; x {BROKEN_OPERAND}")) is None
    assert advice_of(finding(operation="parameter", phase="before")) is None
    assert advice_of(finding("GS201", operation="log")) is None


@pytest.mark.parametrize(
    ("dtype", "smallest", "largest", "advice"),
    [
        ("float32", -1e20, 3.0, OVERFLOW),
        ("float32", 0.0, 3.0, POWER),
        ("float32", None, None, POWER),
        ("bfloat16", 0.0, 1e25, OVERFLOW),
        ("float16", -300.0, 3.0, HALF),
    ],
)
def test_a_power_of_large_numbers_overflows(
    dtype: str, smallest: float | None, largest: float | None, advice: Advice
) -> None:
    given = TensorSummary((2,), dtype, smallest, largest, 0, 0)
    assert advice_of(finding(operation="pow", inputs=(given,))) is advice
