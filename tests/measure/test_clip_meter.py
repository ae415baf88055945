"""The clip coefficient from a sample of every gradient: one number, or none."""

import pytest
import torch
from torch import Tensor

from gradsight.measure.clipping import SAMPLED, ClipMeter, ClipReading


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for size in (3, SAMPLED, 5 * SAMPLED):
        parameter = torch.zeros(size, dtype=dtype, requires_grad=True)
        parameter.grad = torch.randn(size, generator=generator).to(dtype)
        made.append(parameter)
    return made


def measured(made: list[Tensor], factor: float, scale: Tensor | None = None) -> ClipReading | None:
    meter = ClipMeter()
    meter.after_backward(made, scale)
    for parameter in made:
        assert parameter.grad is not None
        parameter.grad *= factor
    return meter.before_update(still_scaled=False)


@pytest.mark.parametrize(
    ("dtype", "within"),
    [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 1e-2)],
)
@pytest.mark.parametrize("factor", [1.0, 0.3, 1e-4])
def test_one_factor_is_found(dtype: torch.dtype, within: float, factor: float) -> None:
    reading = measured(parameters(dtype), factor)
    assert reading is not None
    assert reading.read() == pytest.approx(factor, rel=within)


def test_the_loss_scale_is_no_clipping() -> None:
    reading = measured(parameters(), 0.5 / 1024, scale=torch.tensor(1024.0))
    assert reading is not None
    assert reading.read() == pytest.approx(0.5, rel=1e-6)


def test_clipping_by_value_has_no_coefficient() -> None:
    made = parameters()
    meter = ClipMeter()
    meter.after_backward(made, None)
    torch.nn.utils.clip_grad_value_(made, 0.5)
    reading = meter.before_update(still_scaled=False)
    assert reading is not None
    assert reading.read() is None


def test_clipping_of_some_has_no_coefficient() -> None:
    made = parameters()
    meter = ClipMeter()
    meter.after_backward(made, None)
    made[0].grad *= 0.5  # type: ignore[operator]
    reading = meter.before_update(still_scaled=False)
    assert reading is not None
    assert reading.read() is None


def test_nothing_is_told_where_nothing_can_be() -> None:
    meter = ClipMeter()
    assert meter.before_update(still_scaled=False) is None
    made = parameters()
    meter.after_backward(made, torch.tensor(8.0))
    assert meter.before_update(still_scaled=True) is None  # a fused optimizer divides by itself
    meter.after_backward(made, None)
    made[1].grad = None
    assert meter.before_update(still_scaled=False) is None
    zeros = torch.zeros(3, requires_grad=True)
    zeros.grad = torch.zeros(3)
    meter.after_backward([zeros], None)
    reading = meter.before_update(still_scaled=False)
    assert reading is not None
    assert reading.read() is None
