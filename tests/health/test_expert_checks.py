"""Dead and starved experts: what is found in real mixtures, and what only looks like it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradsight
from gradsight.health.expert_life import ExpertLife
from gradsight.values.findings import Finding


class Mixture(nn.Module):
    """Experts in tensors [E, ...], each row to the one or two that the gate likes best."""

    def __init__(self, experts: int, chosen: int = 1) -> None:
        super().__init__()
        self.gate = nn.Linear(8, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 8, 16) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, 16, 8) * 0.3)
        self.chosen = chosen
        self.hidden: list[int] = []
        self.factor = torch.ones(experts)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        if self.hidden:
            logits = logits.index_fill(-1, torch.tensor(self.hidden), -1e9)
        chances = logits.softmax(-1)
        best, where = chances.topk(self.chosen, -1)
        weights = torch.zeros_like(chances).scatter(-1, where, best) * self.factor
        out = torch.einsum(
            "neh,ehd->ned", torch.einsum("nd,edh->neh", x, self.up).relu(), self.down
        )
        return (out * weights[..., None]).sum(1)


class ListOfExperts(nn.Module):
    """The same with a module for each expert, which is not called where it has no rows."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(8, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))
        self.hidden: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        if self.hidden:
            logits = logits.index_fill(-1, torch.tensor(self.hidden), -1e9)
        weights, where = logits.softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = where == number
            if mine.any():
                out[mine] = expert(x[mine]) * weights[mine, None]
        return out


def watched(
    mixture: nn.Module, steps: int, rows: int = 64, change: Callable[[int], None] | None = None
) -> dict[str, Finding]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), mixture, nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with gradsight.watch(model, optimizer, preflight=False) as watch:
        for step in range(steps):
            if change is not None:
                change(step)
            x = torch.randn(rows, 8)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
        return {finding.code: finding for finding in watch.report().findings}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_dead_experts_of_a_tensor_are_named() -> None:
    mixture = Mixture(8)
    mixture.hidden = [2, 5]
    finding = watched(mixture, 60)["GS207"]
    assert finding.parameters == ("1.up", "1.down")
    assert "1.up: 2 of 8 experts (2, 5) had no gradient since step 0" in finding.evidence
    assert finding.severity == "warning"


def test_dead_experts_of_a_list_are_named_and_are_the_cause() -> None:
    mixture = ListOfExperts(4)
    mixture.hidden = [3]
    found = watched(mixture, 60)
    assert found["GS207"].parameters == ("1.experts.3.weight", "1.experts.3.bias")
    assert found["GS207"].evidence.startswith("1.experts: 1 of 4 experts (3)")
    assert found["GS301"].caused_by == "GS207"
    assert found.keys() == {"GS207", "GS301"}


def test_an_expert_that_dies_later_is_told_since_when() -> None:
    mixture = Mixture(4)

    def change(step: int) -> None:
        mixture.hidden = [1] if step > 40 else []

    finding = watched(mixture, 100, change=change)["GS207"]
    assert finding.first_step == 41


@pytest.mark.parametrize("mixture", [lambda: Mixture(8, 2), lambda: ListOfExperts(4)])
def test_one_step_without_a_token_is_no_death(mixture: Callable[[], nn.Module]) -> None:
    experts = mixture()

    def change(step: int) -> None:
        experts.hidden = [0] if step == 8 else []  # type: ignore[assignment]

    assert watched(experts, 60, change=change) == {}


def test_few_rows_leave_experts_out_by_chance() -> None:
    assert "GS207" not in watched(Mixture(16), 60, rows=6)


def test_starved_experts_are_named() -> None:
    mixture = Mixture(4, chosen=4)
    mixture.factor[2] = 1e-4
    found = watched(mixture, 260)
    assert found["GS208"].evidence.startswith("1.up: 1 of 4 experts (2) had a gradient at 100% of")
    assert "GS207" not in found


def test_uneven_loads_are_ordinary() -> None:
    mixture = Mixture(4, chosen=4)
    mixture.factor[2] = 0.2
    assert watched(mixture, 260) == {}


def life_of(looks: list[list[float]], every: int = 1) -> ExpertLife:
    life = ExpertLife()
    for number, norms in enumerate(looks):
        life.take(number * every, np.array(norms))
    return life


def test_absence_has_to_be_longer_than_chance_allows() -> None:
    always = [[1.0, 1.0, 0.0]] * 30
    assert life_of(always).dead(30, 0.01).tolist() == [False, False, True]
    assert life_of(always[1:]).dead(30, 0.01).tolist() == [False] * 3
    seldom = [[1.0, float(number % 4 == 0), 0.0] for number in range(30)]
    assert not life_of(seldom).dead(30, 0.01).any()


def test_a_step_that_leaves_the_group_out_says_nothing() -> None:
    life = life_of([[1.0, 1.0], [0.0, 0.0], [np.nan, 1.0]])
    assert life.looks == 1
