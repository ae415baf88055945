"""A fault in a loss that cannot be run again: what is said about it, and how surely."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradsight.incidents.diagnosis.diagnose import DiagnosisOptions, diagnose
from gradsight.incidents.loss_values import loss_values
from gradsight.values.diagnoses import GuiltyOperation
from incidents.diagnosis.capture import line_of, step
from incidents.diagnosis.faults import WIDTH, identity, rows

LIKELY = "likely: no other operation of the loss can do it; "
OUTSIDE = "the outputs are finite, the gradients that came back are not"


def divided(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) / (x - x)).mean()


def rooted(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).pow(2).sum(-1).sqrt().mean()


def twice(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x) * x
    return (y.log() / (x - x)).mean()


def weighted(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * (x * float("nan"))).mean()


def clamped(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).clamp(min=0.0)[:, 0].rsqrt().mean()


def powered(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sub(model(x).detach()).abs().pow(0.5).mean()


def found_in(loss_of: object, x: Tensor) -> GuiltyOperation:
    model = identity()
    passes, loss = step(model, [x], loss_of)  # type: ignore[arg-type]
    operation = diagnose(
        model, passes[:1], DiagnosisOptions(seconds=60, kind="nonfinite", loss_root=loss)
    ).operation
    assert operation is not None
    assert (operation.phase, operation.module) == ("loss", None)
    assert operation.inputs
    return operation


@pytest.mark.parametrize(
    ("loss_of", "operation", "detail"),
    [
        (divided, "div", f"{LIKELY}{OUTSIDE}; the loss is "),
        (
            rooted,
            "sqrt",
            f"{LIKELY}{OUTSIDE}; the loss is finite, so the fault is in",
        ),
        (twice, "loss", f"{OUTSIDE}; the loss is nan; likely mul or log or div"),
        (
            weighted,
            "mul",
            f"{LIKELY}{OUTSIDE}; the loss is nan; an operand of mul that needs no gradient",
        ),
        (clamped, "rsqrt", f"{OUTSIDE}; the loss is inf"),
        (powered, "pow", f"{LIKELY}{OUTSIDE}; the loss is finite"),
    ],
)
def test_what_is_said(loss_of: object, operation: str, detail: str) -> None:
    found = found_in(loss_of, rows((4, 0.0)) if loss_of is clamped else rows())
    assert found.operation == operation
    assert found.detail.startswith(detail)


def test_sure_ones_show_their_input() -> None:
    found = found_in(clamped, rows((4, 0.0)))
    (given,) = found.inputs
    assert (given.shape, given.smallest) == ((16,), 0.0)


def test_without_the_loss_only_the_place_is_known() -> None:
    model = identity()

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)  # the only line that is known
        return y.log().mean()

    passes, _ = step(model, [rows((4, 0.0))], loss_of)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="nonfinite")).operation
    assert found is not None
    assert (found.operation, found.phase, found.detail) == ("loss", "loss", OUTSIDE)
    assert found.place == line_of("the only line that is known", __file__)
    line = found.place.rpartition(":")[2]
    for backward_caller, place in {
        f"{__file__}:{int(line) + 4}": f"{__file__}:{line}-{int(line) + 4}",
        f"{__file__}:{line}": found.place,
        f"{__file__}:1": found.place,  # elsewhere: nothing lies between the two
        "trainer.py:999": found.place,
    }.items():
        passes[0] = replace(passes[0], backward_caller=backward_caller)
        again = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="nonfinite")).operation
        assert again is not None
        assert again.place == place


def test_the_loss_of_another_pass_is_not_blamed() -> None:
    """The bad micro-batch is not the last one, whose loss is at hand."""
    model = identity()
    passes, loss = step(model, [rows((4, 0.0)), rows()], lambda model, x: model(x).log().mean())
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="nonfinite", loss_root=loss))
    assert found.operation is not None
    assert (found.operation.operation, found.operation.detail, found.operation.micro_batch) == (
        "loss",
        OUTSIDE,
        0,
    )
    assert [(sample.micro_batch, sample.row) for sample in found.samples] == [(0, 4)]
    assert found.operation.inputs[0].shape == (16, WIDTH)
    assert torch.isfinite(loss)


def test_infinities_that_are_meant_are_not_blamed_for_the_loss() -> None:
    """A model forbids some classes; the label is one of them."""

    class Choice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(torch.arange(WIDTH) > 3, float("-inf"))

    model = Choice(WIDTH, WIDTH)
    passes, loss = step(model, [rows()], lambda model, x: model(x).softmax(-1).log().mean())
    found = diagnose(
        model, passes, DiagnosisOptions(seconds=60, kind="nonfinite", loss_root=loss)
    ).operation
    assert found is not None
    assert (found.operation, found.phase) == ("log", "loss")
    assert found.detail.startswith(
        "the outputs hold infinities that the model wrote on purpose, "
        "the gradients that came back are"
    )


def test_saved_tensors_whose_memory_was_freed_are_not_read() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    x = torch.full((2, 4), float("nan"), requires_grad=True)
    loss = (x @ weight.t()).sum()
    assert loss.grad_fn is not None
    weight.untyped_storage().resize_(0)  # as FSDP does with whole parameters
    product = loss.grad_fn.next_functions[0][0]
    transposed = product.next_functions[1][0]
    found = loss_values(loss, [transposed, product, loss.grad_fn])
    assert found.states == {loss.grad_fn: "nan"}
