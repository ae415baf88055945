"""A rank whose own gradients stand apart: over made-up norms, and over real processes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradsight.core.guard import Guard
from gradsight.measure.local import LocalNorms, exact_local_norms
from health.test_checks import compared, jittered
from launch import run_ranks

SCRIPT = Path(__file__).with_name("ranks.py")
NOISY = np.exp(1.5 * np.random.default_rng(0).normal(size=(40, 2)))


def one_layer(number: int) -> Any:
    return [[1.0] * 6, [1.0, 1.0, 1.0, 30.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("norms", "first", "text"),
    [
        (
            lambda n: [jittered(n), 30.0 if 25 <= n < 28 else jittered(n + 1)],
            25,
            "at 3 measured steps in a row, from step 25 on, rank 1 has",
        ),
        (lambda n: [np.nan if n == 7 else 1.0, 1.0], 7, "step 7: NaN or Inf on rank 0 alone"),
        (lambda n: [0.0 if n >= 5 else 1.0, jittered(n)], 5, "rank 0 has almost no gradient"),
    ],
    ids=["jump", "not finite", "nothing"],
)
def test_what_stands_apart(norms: Callable[[int], Any], first: int, text: str) -> None:
    finding = compared(norms)["GS503"]
    assert finding.first_step == first
    assert text in finding.evidence
    assert finding.severity == ("critical" if "NaN" in text else "warning")


def test_one_layer_of_one_rank_is_named() -> None:
    finding = compared(one_layer, full=True)["GS503"]
    assert finding.parameters == ("blocks.3.weight",)
    assert (
        "in 1 of 6 parameters, at 3 measured steps, rank 1 has 30 times the gradient of the others"
        in finding.evidence
    )


@pytest.mark.parametrize(
    "norms",
    [
        lambda n: [np.nan, np.inf],
        lambda n: NOISY[n],
        lambda n: [jittered(n), jittered(n) / 30 if n == 25 else jittered(n + 1)],
        lambda n: [jittered(n), 30.0 if n in (25, 30) else jittered(n + 1)],
        lambda n: [jittered(n), 30.0 if 25 <= n < 27 else jittered(n + 1)],
        lambda n: [30.0, 30.0] if n == 25 else [1.0, 1.0],
    ],
    ids=[
        "broken everywhere",
        "very noisy",
        "one small batch",
        "single steps",
        "two steps",
        "all ranks jump",
    ],
)
def test_what_is_not_of_a_rank_is_left_alone(norms: Callable[[int], Any]) -> None:
    assert "GS503" not in compared(norms)


def test_an_overflow_that_the_scaler_leaves_out_is_left_alone() -> None:
    assert "GS503" not in compared(lambda n: [np.inf, 1.0], skipped=True)


def test_norms_of_micro_batches_agree_with_the_plain_loop() -> None:
    torch.manual_seed(0)
    gradients = [[torch.randn(5, 3), torch.randn(4).half()] for _ in range(3)]
    norms = LocalNorms([], Guard(None, "test", "a hook failed"))
    for micro_batch in gradients:
        for row, gradient in enumerate(micro_batch):
            norms.see(row, gradient)
    assert norms.take().read(4, [0, 1, 2]) == pytest.approx(
        [*exact_local_norms(gradients), 0.0, -1.0]
    )
    assert norms.take().read(2, [0]).tolist() == [0.0, -1.0]


def test_real_ranks_under_ddp() -> None:
    told = json.loads(run_ranks(SCRIPT, "ddp").split("RESULT ")[1].splitlines()[0])
    assert told["healthy"] == told["accumulated"] == {}
    assert told["scaled"]["GS503"]["first_step"] == 20
    assert "rank 1 has" in told["scaled"]["GS503"]["evidence"]
    assert told["nan"]["GS503"]["severity"] == "critical"
    assert "step 20: NaN or Inf on rank 1 alone" in told["nan"]["GS503"]["evidence"]
    assert told["layer"]["GS503"]["parameters"] == ["2.weight"]


@pytest.mark.slow
def test_real_ranks_under_fsdp2_are_judged_by_whole_parameters() -> None:
    told = json.loads(run_ranks(SCRIPT, "fsdp").split("RESULT ")[1].splitlines()[0])
    assert told["healthy"] == {}
    assert told["abstained"].endswith("(FSDP2 hides them)")
    assert told["nan"]["GS103"]["first_step"] == 20
    assert set(told["nan"]["GS103"]["parameters"]) == {
        f"{n}.{kind}" for n in (0, 2, 4) for kind in ("weight", "bias")
    }
    assert told["vanishing"]["GS204"]["parameters"] == ["0"]
    assert told["missing"]["GS302"]["parameters"] == ["0.weight", "0.bias"]
    assert told["still"]["GS304"]["parameters"] == ["0.weight", "0.bias"]
    assert "GS503" not in told["scaled"]
