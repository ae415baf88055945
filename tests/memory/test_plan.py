"""Plans: they fit, they are the cheapest there is, and they say so when nothing fits."""

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from gradsight import (
    apply_checkpointing,
    plan_checkpointing,
    predict_peak_memory,
    verify_checkpointing,
)
from gradsight.errors import GradsightError, UsageError
from gradsight.memory.choose import BlockOption, BlockProblem, cheapest, cost_of, lowest, peak_of
from gradsight.memory.plan import OverBudget

Build = Callable[[], tuple[Any, ...]]
MOST_TRIED = 200 * 1000
"""A thousand partial choices for each of 200 blocks; a search of all choices would try 4 ** 200."""


def some_problem(seed: int) -> BlockProblem:
    draw = random.Random(seed).randrange
    blocks = [
        [BlockOption(draw(100), draw(150), draw(-20, 150), draw(50)) for _ in range(draw(2, 4))]
        for _ in range(draw(1, 6))
    ]
    return BlockProblem(draw(50), draw(200), draw(50), blocks)


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    problem = some_problem(seed)
    every = list(product(*(range(len(options)) for options in problem.blocks)))
    smallest = min(peak_of(problem, choice) for choice in every)
    assert peak_of(problem, lowest(problem)) == smallest
    assert cheapest(problem, smallest - 1) is None
    for limit in (smallest, smallest + 20, smallest + 90, 10_000):
        chosen = cheapest(problem, limit, buckets=10**6)
        assert chosen is not None
        assert peak_of(problem, chosen) <= limit
        assert cost_of(problem, chosen) == min(
            cost_of(problem, c) for c in every if peak_of(problem, c) <= limit
        )


class CountedOptions(list[BlockOption]):
    """The options of a block, which count how often they are tried."""

    tried = 0

    def __iter__(self) -> Iterator[BlockOption]:
        CountedOptions.tried += 1
        assert CountedOptions.tried <= MOST_TRIED
        return super().__iter__()


def test_two_hundred_blocks_need_a_bounded_number_of_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedOptions, "tried", 0)
    options = [
        BlockOption(100, 110, 30, 0),
        BlockOption(60, 110, 80, 2),
        BlockOption(40, 110, 90, 5),
        BlockOption(7, 110, 120, 9),
    ]
    problem = BlockProblem(1000, 0, 50, [CountedOptions(options)] * 200)
    chosen = cheapest(problem, 9000)
    assert chosen is not None
    assert peak_of(problem, chosen) <= 9000
    assert CountedOptions.tried > 200


def rivals(build: Build, count: int, optimizer: str | None = None) -> list[tuple[int, int]]:
    """Peak and operations of all, nothing, and every first-k."""
    policies = ["none", "full", *(f"first:{k}" for k in range(1, count))]
    uses = [predict_peak_memory(build, policy=policy, optimizer=optimizer) for policy in policies]
    return [(use.peak_bytes, use.flops) for use in uses]


@pytest.mark.slow
def test_never_worse_than_simple_policies(make_gpt: Callable[..., Any]) -> None:
    def build() -> tuple[Any, ...]:
        return make_gpt(depth=3, batch=8, length=65)

    known = rivals(build, 3, "adamw")
    plain, least = known[0], min(peak for peak, _ in known)
    for share in (0.5, 0.0):
        budget = int(least + share * (plain[0] - least))
        plan = plan_checkpointing(build, budget)
        assert plan.predicted_bytes <= budget
        best = min(flops for peak, flops in known if peak <= budget)
        assert plan.extra_flops <= best / plain[1] - 1 + 1e-9
        assert predict_peak_memory(build, policy=plan).peak_bytes == plan.predicted_bytes
        assert plan.baseline_bytes == plain[0]


def test_a_plan_is_true_when_it_runs(make_gpt: Callable[..., Any]) -> None:
    def build() -> tuple[Any, ...]:
        return make_gpt(dropout=0.1)

    plan = plan_checkpointing(build, int(0.7 * predict_peak_memory(build).peak_bytes))
    report = verify_checkpointing(build, policy=plan)
    assert report.passed, (report.first_difference, report.cause)
    assert report.optimized_bytes == pytest.approx(plan.predicted_bytes, rel=0.01)
    assert report.extra_flops == pytest.approx(plan.extra_flops, abs=1e-6)
    assert report.policy == plan.policy
    model = build()[0]
    assert apply_checkpointing(model, plan.policy).modes, "the text applies as well"


def test_a_budget_that_needs_nothing(make_gpt: Callable[..., Any]) -> None:
    plan = plan_checkpointing(make_gpt, "1GB")
    assert (plan.policy, plan.extra_flops) == ("none", 0.0)
    assert plan.predicted_bytes == plan.baseline_bytes


def test_an_impossible_budget_names_the_smallest_peak(make_gpt: Callable[..., Any]) -> None:
    with pytest.raises(
        OverBudget,
        match=r"no checkpointing fits 1\.00 kB: the smallest reachable peak is 739 kB, with policy",
    ) as caught:
        plan_checkpointing(make_gpt, "1kB", optimizer=None)
    smallest = caught.value.smallest
    assert smallest.predicted_bytes <= min(peak for peak, _ in rivals(make_gpt, 2))
    assert smallest.policy in str(caught.value)


@pytest.mark.parametrize("name", [pytest.param("hf t5", marks=pytest.mark.slow), "convolutions"])
def test_other_models(table: dict[str, Build], name: str) -> None:
    known = rivals(table[name], 1)
    budget = (known[0][0] + known[1][0]) // 2
    plan = plan_checkpointing(table[name], budget, optimizer=None)
    assert plan.predicted_bytes <= budget
    assert (
        plan.extra_flops
        <= min(flops for peak, flops in known if peak <= budget) / known[0][1] - 1 + 1e-9
    )


class Recurrent(nn.Module):
    """One block that is run several times, beside another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = x + block(x)
        return x.square().mean()


@pytest.mark.slow
def test_blocks_that_run_twice() -> None:
    def build() -> tuple[Any, ...]:
        return Recurrent(), torch.randn(400, 32), lambda m, b: m(b)

    plain, full = (
        predict_peak_memory(build, policy=policy).peak_bytes for policy in ("none", "full")
    )
    budget = (plain + full) // 2
    plan = plan_checkpointing(build, budget)
    assert plan.predicted_bytes <= budget
    assert (
        0
        <= plan.extra_flops
        < predict_peak_memory(build, policy="full").flops / predict_peak_memory(build).flops
        - 1
        + 1e-9
    )


def test_for_cuda(make_gpt: Callable[..., Any]) -> None:
    def build() -> tuple[Any, ...]:
        return make_gpt(dropout=0.1, length=65)

    budget = int(0.8 * predict_peak_memory(build, device="cuda").peak_bytes)
    plan = plan_checkpointing(build, budget, device="cuda")
    assert plan.device == "cuda"
    assert (
        plan.predicted_bytes
        == predict_peak_memory(build, policy=plan, device="cuda").peak_bytes
        <= budget
    )


def test_bad_input(make_gpt: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="'lots' is not a size of memory: write for example '6GB'"):
        plan_checkpointing(make_gpt, "lots")
    with pytest.raises(UsageError, match="device must be one of cpu, cuda"):
        plan_checkpointing(make_gpt, "1GB", device="mps")
    with pytest.raises(UsageError, match="no repeated blocks found in Linear"):
        plan_checkpointing(
            lambda: (nn.Linear(2, 2), torch.ones(1, 2), lambda m, b: m(b).sum()), "1GB"
        )

    def values() -> tuple[Any, ...]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
        return model, torch.randn(3, 4), lambda m, b: m(b[m(b).sum(1) > 0]).sum()

    with pytest.raises(GradsightError, match="needs real data"):
        plan_checkpointing(values, "1GB")
