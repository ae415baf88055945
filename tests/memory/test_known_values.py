"""Steps that ask for values: what is known is true, what is not is assumed, said and bounded."""

from typing import Any

import pytest
import torch
from torch import nn

from gradsight import predict_peak_memory
from gradsight.errors import GradsightError
from gradsight.memory.assumed_values import routes
from gradsight.memory.predict import fake_device
from memory import families
from memory.measured_step import measured

FIRST_TIER = ("bart", "mixtral")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FIRST_TIER else pytest.mark.slow)
        for name in families.EXACT
    ],
)
def test_families_that_ask_for_values(name: str) -> None:
    use = predict_peak_memory(families.EXACT[name])
    assert use.peak_bytes == pytest.approx(measured(families.EXACT[name]), rel=0.001)
    assert use.bounds is None
    assert all("random numbers of build()" in text for text in use.assumptions)


def test_layer_drop_is_predicted_with_every_layer_kept() -> None:
    whole = predict_peak_memory(families.sequence_to_sequence("Bart"))
    build = families.sequence_to_sequence("Bart", encoder_layerdrop=0.5, decoder_layerdrop=0.5)
    use = predict_peak_memory(build)
    assert use.peak_bytes == whole.peak_bytes
    assert use.bounds is None
    assert "random numbers drawn in the step" in use.assumptions[0]


def test_experts_in_a_loop_have_an_even_load() -> None:
    build = families.experts("Mixtral", loop=True, num_local_experts=4)
    use = predict_peak_memory(build)
    assert use.assumptions == ("routing spreads tokens evenly over the experts",)
    assert use.bounds is not None
    assert use.bounds[0] <= use.peak_bytes <= use.bounds[1]
    torch.manual_seed(0)
    assert use.bounds[0] <= measured(build) <= use.bounds[1]


@pytest.mark.parametrize(
    ("routing", "load"), [("even", [4, 4, 4, 4]), ("one expert", [7, 7, 1, 1])]
)
def test_loads(routing: str, load: list[int]) -> None:
    assert routes(routing, 8, 2, 4).flatten().bincount(minlength=4).tolist() == load


def test_values_follow_writes_and_views() -> None:
    """Against the same program on real tensors; a view shares what is written."""

    def program() -> list[float]:
        numbers = torch.arange(12).view(3, 4)
        row = numbers[1]
        row += 10
        numbers[:, 2].zero_()
        mask = numbers > 5
        chosen = numbers[mask]
        made = torch.empty(3).fill_(2.0)
        made[0] = torch.tensor([7.0]).max()
        return [*chosen.tolist(), *made.tolist(), float(mask.sum()), float(row.max())]

    with fake_device("cpu"):
        known = program()
    assert known == program()


def test_what_is_written_from_unknown_values_is_unknown() -> None:
    with fake_device("cpu") as values:
        numbers = torch.zeros(4)
        view = numbers[1:]
        assert values.knows(view)
        view.copy_(nn.Linear(3, 3).weight[0])
        assert not values.knows(numbers)
        assert not values.knows(nn.Parameter(torch.zeros(2)))


def test_the_users_random_state_stays() -> None:
    def build() -> tuple[Any, ...]:
        torch.manual_seed(5)
        return nn.Linear(4, 4), torch.randn(2, 4), lambda model, batch: model(batch).sum()

    torch.manual_seed(0)
    before = torch.get_rng_state()
    predict_peak_memory(build)
    assert torch.equal(before, torch.get_rng_state())


class Chooser(nn.Module):
    """As many rows as the batch's own numbers say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows[rows.sum(1) > 0]).tanh().sum()


def test_a_batch_that_decides_is_exact_or_assumed() -> None:
    def certain() -> tuple[Any, ...]:
        return Chooser(), (torch.cat([torch.ones(60, 64), -torch.ones(40, 64)]),)

    use = predict_peak_memory(certain)
    assert use.peak_bytes == measured(certain)
    assert use.assumptions == ()
    drawn = predict_peak_memory(lambda: (Chooser(), (torch.randn(1000, 64),)), optimizer=None)
    assert drawn.bounds is None
    assert "as they were drawn once" in drawn.assumptions[0]


def test_what_cannot_be_known_is_refused_with_its_line() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).sum()
        return loss if loss.item() > 0 else -loss

    with pytest.raises(GradsightError, match=r"needs real data.*in loss_fn, .*test_known_values"):
        predict_peak_memory(lambda: (nn.Linear(4, 4), torch.ones(2, 4), loss_fn))
