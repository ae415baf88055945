"""A sample's gradient alone: its rows of the outputs' gradient, after proof that they are its."""

import pytest
import torch
from torch import Tensor, nn

from gradsight.core.per_sample import BatchOutputs, outputs_with_rows
from gradsight.core.samples import NotSeparable, find_samples


class Losing(nn.Linear):
    """Returns its loss alone."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(super().forward(x), torch.zeros(len(x), 3))


def test_the_samples_gradients_add_up_to_the_batchs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    call = find_samples([torch.randn(5, 2, dtype=torch.float64)], {}, None, None, model)
    outputs = outputs_with_rows(model, [call])
    cotangents = [torch.randn_like(output) for output in outputs]
    whole = torch.autograd.grad(outputs, list(model.parameters()), cotangents)
    batch = BatchOutputs([output.detach() for output in outputs], cotangents, call.batch)
    total = [torch.zeros_like(gradient) for gradient in whole]
    for row in range(call.batch):
        alone = outputs_with_rows(model, [call], row)
        pieces = batch.cotangents_of(row, alone)
        for sum_, part in zip(
            total, torch.autograd.grad(alone, list(model.parameters()), pieces), strict=True
        ):
            sum_ += part
    for gradient, sum_ in zip(whole, total, strict=True):
        assert torch.allclose(gradient, sum_, rtol=1e-12)


def test_a_model_that_returns_its_loss_is_cut_at_the_losses_input() -> None:
    model = Losing(2, 3)
    call = find_samples([torch.randn(5, 2)], {}, None, None, model)
    (rows,) = outputs_with_rows(model, [call])
    assert rows.shape == (5, 3)
    (alone,) = outputs_with_rows(model, [call], 2)
    assert alone.shape == (1, 3)


def test_samples_that_are_not_independent_are_refused() -> None:
    model = nn.BatchNorm1d(2)
    x = torch.randn(4, 2)
    batch = BatchOutputs([model(x)], [torch.ones(4, 2)], 4)
    with pytest.raises(NotSeparable, match="sample 1 alone gives another output than in the batch"):
        batch.cotangents_of(1, [x[1:2]])


def test_rounding_may_be_allowed_for() -> None:
    outputs = torch.randn(4, 2)
    alone = outputs[1:2] * 1.01
    strict = BatchOutputs([outputs], [outputs], 4)
    with pytest.raises(NotSeparable):
        strict.cotangents_of(1, [alone])
    (piece,) = BatchOutputs([outputs], [outputs], 4, within=0.05).cotangents_of(1, [alone])
    assert torch.equal(piece, outputs[1:2])
