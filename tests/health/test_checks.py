"""Every check over a sequence of steps: one that it must find, and its nearest neighbour that it
must leave alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradsight.health.judge import Judge
from gradsight.health.registry import CHECKS, chosen
from gradsight.health.window import Subject
from gradsight.values.findings import Finding
from gradsight.values.first_step import (
    CopiedTargets,
    CountedLabels,
    FedLoss,
    FirstStep,
    Leak,
    RepeatedPass,
    StepPasses,
)
from gradsight.values.measured import Details, MeasuredStep, Norms, RankComparison, StepSignals
from gradsight.values.steps import Step

NAMES = [f"blocks.{index}.weight" for index in range(6)]
Steps = Iterator[MeasuredStep]


def subject(**changes: Any) -> Subject:
    size = len(NAMES)
    plain: dict[str, Any] = {
        "names": list(NAMES),
        "shapes": [(8, 8)] * size,
        "trainable": [True] * size,
    }
    plain |= {"kinds": ["Linear"] * size, "half": [False] * size, "memberships": [1] * size}
    return Subject(**plain | changes)


def observed(number: int, l2: Any = 1.0, **changes: Any) -> MeasuredStep:
    """A step whose parameters have these norms."""
    norms = np.broadcast_to(np.asarray(l2, dtype=float), (len(NAMES),)).copy()
    step = {
        name: changes.pop(name)
        for name in ("clip_coef", "scale", "skipped", "lr")
        if name in changes
    }
    bad = ~np.isfinite(norms)
    counts = (np.isnan(norms).astype(float), np.isinf(norms).astype(float)) if bad.any() else None
    total = float(np.sqrt((norms**2).sum()))
    details = changes.pop("details", None)
    return MeasuredStep(
        Step(number, 0.0, total_norm=total, **step),
        None,
        Norms(norms, norms, counts, total),
        details,
        StepSignals(**changes),
    )


def jittered(number: int) -> float:
    """A norm that varies a little, and never repeats."""
    return 1.0 + 0.2 * np.sin(number * 1.7) + number * 1e-6


def run(steps: Steps, settings: object = True, **about: Any) -> dict[str, Finding]:
    judge = Judge(subject(**about), chosen(settings))
    for step in steps:
        judge.observe(step)
    return {finding.code: finding for finding in judge.findings()}


def usual(count: int = 60, **changes: Any) -> Steps:
    return (observed(number, jittered(number), **changes) for number in range(count))


def with_one(at: int, l2: Any, **changes: Any) -> Steps:
    return (
        observed(n, l2 if n == at else jittered(n), **(changes if n == at else {}))
        for n in range(60)
    )


def of(function: Callable[[int], Any], count: int = 60, **changes: Any) -> Steps:
    return (observed(number, function(number), **changes) for number in range(count))


def looked(
    ratio: Any = 1e-3,
    zero: float = 0.0,
    tiny: float = 0.0,
    dead: float = 0.0,
    weight: float | None = None,
    **changes: Any,
) -> Steps:
    for number in range(60):
        details = None
        if number % 5 == 0:
            now = ratio(number) if callable(ratio) else ratio
            values = {"update_ratio": now, "zero_share": zero, "tiny_share": tiny}
            values |= {"dead_share": dead, "weight_square": number if weight is None else weight}
            columns = {
                name: np.broadcast_to(np.asarray(value, dtype=float), (len(NAMES),)).copy()
                for name, value in values.items()
            }
            details = Details(number, columns)
        yield observed(number, jittered(number), details=details, **changes)


def losing(norm: Callable[[int], float], loss: Callable[[int], float]) -> Steps:
    return (observed(number, norm(number), loss=loss(number)) for number in range(120))


def compared(
    function: Callable[[int], Any], skipped: bool = False, full: bool = False
) -> dict[str, Finding]:
    """Steps after each of which ranks are compared: `function` gives their norms, [ranks] or
    [ranks, parameters].
    """
    judge = Judge(subject())
    for number in range(40):
        judge.observe(observed(number, jittered(number), skipped=skipped))
        norms = np.broadcast_to(
            np.asarray(function(number), dtype=float).T, (len(NAMES), 2)
        ).T.copy()
        always = np.arange(len(NAMES)) < (2 if full else len(NAMES))
        judge.compare(RankComparison(number, np.arange(len(NAMES)), norms, always))
    return {finding.code: finding for finding in judge.findings()}


def began(**seen: Any) -> dict[str, Finding]:
    """A run of which this was seen at its first step."""
    first = FirstStep(**seen)
    return run(observed(n, jittered(n), first=None if n else first) for n in range(20))


def passed(**seen: Any) -> dict[str, Finding]:
    """A run whose backward passes were like this."""
    return run(observed(n, jittered(n), passes=StepPasses(**seen)) for n in range(20))


HOLE = [1, 1, 0, 1, 1, 1]
DEEP = np.array([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1])
FALLING = [10.0 ** (-number / 20) for number in range(120)]

CASES: list[tuple[str, Callable[[], dict[str, Finding]], Callable[[], dict[str, Finding]]]] = [
    ("GS101", lambda: run(of(lambda n: 80 + n)), lambda: run(with_one(30, 80.0), {"GS201": False})),
    ("GS102", lambda: run(of(lambda n: 800 + n)), lambda: run(of(lambda n: 800 + n, clip_coef=1e-3), {"GS405": False})),
    ("GS103", lambda: run(with_one(9, np.nan)), lambda: run(with_one(9, np.nan, skipped=True, scale=8.0))),
    ("GS104", lambda: run(with_one(9, np.inf)), lambda: run(with_one(9, np.inf, skipped=True, scale=8.0))),
    ("GS105", lambda: run(of(lambda n: 1e-5 * jittered(n))), lambda: run(of(lambda n: 1e-2 * jittered(n)))),
    ("GS106", lambda: run(of(lambda n: 0.0)), lambda: run(with_one(30, 0.0))),
    ("GS107", lambda: run(of(lambda n: [0, 0, 0, 0, 1, jittered(n)])), lambda: run(of(lambda n: [0, 0, 0, 1, 1, jittered(n)]), {"GS301": False})),
    ("GS108", lambda: run(looked(loss=8.0, guess=1.6)), lambda: run(looked(loss=4.0, guess=1.6))),
    ("GS201", lambda: run(with_one(40, 30.0)), lambda: run(with_one(40, 5.0))),
    ("GS202", lambda: run(of(lambda n: 1.05**n, 120), {"GS101": False}), lambda: run(of(lambda n: 0.001 * 1.05**n, 120), {"GS105": False})),
    ("GS203", lambda: run(losing(lambda n: FALLING[n], lambda n: 2.3)), lambda: run(losing(lambda n: FALLING[n], lambda n: FALLING[n]))),
    ("GS204", lambda: run(of(lambda n: DEEP * jittered(n))), lambda: run(of(lambda n: DEEP ** 0.4 * jittered(n)))),
    ("GS205", lambda: run(looked(dead=0.8)), lambda: run(looked(dead=0.3))),
    ("GS301", lambda: run(of(lambda n: [1, 1, 0, 1, 1, jittered(n)])), lambda: run(of(lambda n: [1, 1, 0, 1, 1, jittered(n)]), memberships=HOLE)),
    ("GS302", lambda: run(looked(), memberships=HOLE), lambda: run(looked(), memberships=None)),
    ("GS303", lambda: run(looked(), memberships=[1, 2, 1, 1, 1, 1]), lambda: run(looked())),
    ("GS304", lambda: run(looked(ratio=[1e-3, 0, 1e-3, 1e-3, 1e-3, 1e-3])), lambda: run(looked(ratio=lambda n: 1e-3 if n < 20 else 0.0, lr=0.0))),
    ("GS305", lambda: run(usual(uncleared=True)), lambda: run(usual(uncleared=False))),
    ("GS401", lambda: run(looked(ratio=0.9)), lambda: run(looked(ratio=[0.9, 0.01, 0.01, 0.01, 0.01, 0.01]))),
    ("GS402", lambda: run(looked(ratio=1e-9)), lambda: run(looked(ratio=1e-5))),
    ("GS403", lambda: run(looked(tiny=0.5, zero=0.3), half=[True] * 6), lambda: run(looked(tiny=0.5, zero=0.3))),
    ("GS404", lambda: run(usual(scale=0.5, skipped=True)), lambda: run(with_one(3, 1.0, scale=32768.0, skipped=True))),
    ("GS405", lambda: run(of(jittered, 120, clip_coef=0.01)), lambda: run(of(jittered, 120, clip_coef=0.5))),
    ("GS501", lambda: run(of(lambda n: 1.0)), lambda: run(usual())),
    ("GS502", lambda: run(usual(alike_batches=9)), lambda: run(usual(alike_batches=3))),
    ("GS503", lambda: compared(lambda n: [jittered(n), 20 * jittered(n + 1)]), lambda: compared(lambda n: [jittered(n), 3 * jittered(n + 1)])),
    ("GS601", lambda: began(positions=Leak(0.2, 8, "it sees")), lambda: began(positions=Leak(1e-5, 8))),
    ("GS602", lambda: began(rows=Leak(0.2, 2, "it sees")), lambda: began(rows=Leak(1e-6, 2))),
    ("GS603", lambda: began(documents=Leak(0.2, 1, "it sees")), lambda: began(documents=Leak(0.0, 1))),
    ("GS604", lambda: began(copied=CopiedTargets(1.0, True, True)), lambda: began(copied=CopiedTargets(1.0, True, False))),
    ("GS605", lambda: began(fed=(FedLoss("nll_loss", "logits", "log-probabilities"),)), lambda: began(fed=())),
    ("GS606", lambda: began(labels=(CountedLabels("cross_entropy", 8, 0),)), lambda: began(labels=(CountedLabels("cross_entropy", 8, 1),))),
    ("GS607", lambda: began(depends=False, independence="the same"), lambda: began(depends=None)),
    ("GS608", lambda: passed(evaluating=(("body", "2 dropout layers are off"),)), lambda: passed()),
    ("GS609", lambda: passed(repeated=RepeatedPass(4, 1.0)), lambda: passed(repeated=RepeatedPass(4, 0.25))),
    ("GS610", lambda: run(looked(ratio=0.3, passes=StepPasses(summed=64))), lambda: run(looked(ratio=0.01, passes=StepPasses(summed=64)))),
    ("GS611", lambda: passed(thrown_away=(3, "train.py:8")), lambda: passed(thrown_away=None)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "found"), [(code, found) for code, found, _ in CASES], ids=[case[0] for case in CASES]
)
def test_a_check_finds_its_fault(code: str, found: Callable[[], dict[str, Finding]]) -> None:
    findings = found()
    assert code in findings
    finding = findings[code]
    assert finding.severity in ("warning", "critical")
    assert all(
        (finding.name, finding.message, finding.evidence, finding.recommendation, finding.fix)
    )


@pytest.mark.parametrize(
    ("code", "left"), [(code, left) for code, _, left in CASES], ids=[case[0] for case in CASES]
)
def test_a_check_leaves_its_neighbour_alone(
    code: str, left: Callable[[], dict[str, Finding]]
) -> None:
    assert code not in left()


def noisy(sigma: float, level: Callable[[int], float], count: int = 600) -> Steps:
    """Norms of this level whose logarithms scatter by `sigma`."""
    scatter = np.random.default_rng(0).normal(size=count) * sigma
    # The total of six parameters with the same norm.
    share = len(NAMES) ** -0.5
    return of(lambda n: share * level(n) * np.exp(scatter[n]), count)


def line(n: int) -> float:
    """From 1 to 20 in 200 steps."""
    return 1 + 19 * n / 199


@pytest.mark.parametrize(
    "steps",
    [
        lambda: noisy(0.0, line, 200),
        lambda: noisy(0.2, line, 200),
        lambda: noisy(0.2, lambda n: line(max(0, n - 300)), 500),
    ],
    ids=["smooth", "noisy", "after 300 level steps"],
)
def test_a_straight_rise_is_found(steps: Callable[[], Steps]) -> None:
    finding = run(steps())["GS202"]
    assert finding.severity == "warning"
    assert "median norm by quarter of the last" in finding.evidence


@pytest.mark.parametrize(
    "steps",
    [
        lambda: noisy(0.3, lambda n: 12.0),
        lambda: noisy(1.0, lambda n: 30.0),
        lambda: noisy(0.2, lambda n: line(min(2 * n, 199))),
        lambda: noisy(0.1, lambda n: 1 + 19 * (1 - np.exp(-n / 80))),
        lambda: noisy(0.2, lambda n: 0.45 * line(n), 200),
        lambda: noisy(0.2, lambda n: 20 * 0.99**n + 1),
    ],
    ids=["noisy", "wild", "warm-up", "levels off", "within the healthy range", "falls"],
)
def test_what_only_looks_like_a_rise(steps: Callable[[], Steps]) -> None:
    assert "GS202" not in run(steps())


def test_every_check_is_in_the_table() -> None:
    assert sorted(CHECKS) == [code for code, _, _ in CASES]


def test_gates_save_work_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = [(found(), left()) for _, found, left in CASES]
    assert any(check.asked.gate for check in CHECKS.values())
    for code, check in CHECKS.items():
        asked = replace(check.asked, gate=None)
        monkeypatch.setitem(CHECKS, code, replace(check, asked=asked))
    assert [(found(), left()) for _, found, left in CASES] == gated


def test_an_ordinary_run_has_no_finding() -> None:
    assert run(usual(300)) == {}


def test_the_code_of_every_fix_is_python() -> None:
    for check in CHECKS.values():
        compile(check.advice.fix, check.code, "exec")


def test_every_check_says_why() -> None:
    for check in CHECKS.values():
        assert "Why:" in (check.function.__doc__ or ""), check.code
        assert len(chosen({check.code: False})) == len(CHECKS) - 1
