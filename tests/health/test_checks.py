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
from gradsight.health.window import GroupSettings, Subject
from gradsight.values.experts import ExpertGroup
from gradsight.values.findings import Finding
from gradsight.values.first_step import (
    ConstantLoss,
    CopiedTargets,
    CountedLabels,
    DoubleShift,
    FedLoss,
    FirstStep,
    Leak,
    PaddingLabels,
    RepeatedPass,
    SampleLabels,
    StepPasses,
)
from gradsight.values.measured import (
    Details,
    MeasuredStep,
    Norms,
    RankComparison,
    RankDigests,
    StepSignals,
)
from gradsight.values.networks import UnmovedNetwork
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


def with_networks(*unmoved: UnmovedNetwork) -> dict[str, Finding]:
    """Usual steps, and at their end these networks that no optimizer has moved."""
    judge = Judge(subject(), chosen(True))
    for step in usual():
        judge.observe(step)
    judge.compare_networks(unmoved)
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
    rms: Callable[[int], float] = lambda number: 0.2,
    alike: float = 1.0,
    count: int = 60,
    loss: Callable[[int], float] | float | None = None,
    **changes: Any,
) -> Steps:
    for number in range(count):
        details = None
        if number % 5 == 0:
            now = ratio(number) if callable(ratio) else ratio
            values = {"update_ratio": now, "zero_share": zero, "tiny_share": tiny}
            values |= {"dead_share": dead, "weight_square": number if weight is None else weight}
            values |= {"weight_rms": rms(number), "update_rms": now, "likeness": alike}
            columns = {
                name: np.broadcast_to(np.asarray(value, dtype=float), (len(NAMES),)).copy()
                for name, value in values.items()
            }
            details = Details(number, columns)
        if loss is not None:
            changes["loss"] = loss(number) if callable(loss) else loss
        yield observed(number, jittered(number), details=details, **changes)


def losing(norm: Callable[[int], float], loss: Callable[[int], float]) -> Steps:
    return (observed(number, norm(number), loss=loss(number)) for number in range(120))


def digested(**facts: Any) -> dict[str, Finding]:
    """Steps at which the checksums of two ranks compare like this."""
    judge = Judge(subject())
    for number in (0, 2, 8):
        judge.observe(observed(number, jittered(number)))
        known = {"parallel": None, "same_start": True, "same_gradient": True, "same_weights": True}
        digests = RankDigests(number, 2, **{**known, "same_batch": False, **facts})
        judge.compare_digests([digests])
    return {finding.code: finding for finding in judge.findings()}


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


def routed(norms: Any, count: int = 80) -> dict[str, Finding]:
    """A run in which the first parameter holds four experts, with gradients of these norms."""
    group = ExpertGroup(NAMES[0], 4, 0)
    steps = []
    for number in range(count):
        now = norms(number) if callable(norms) else norms
        experts = {NAMES[0]: np.array(now, dtype=float)}
        steps.append(replace(observed(number, jittered(number)), experts=experts))
    return run(iter(steps), experts=(group,))


def stuck_at(level: float) -> Callable[[int], float]:
    """A loss that falls to a level within a few steps, and stays there."""
    return lambda number: level + 3.5 * 0.7**number


MASKED = FirstStep(labels=(CountedLabels("cross_entropy", labels=100, counted=15),))


def stuck_steps(first: FirstStep | None = None) -> Steps:
    """Steps whose loss stays where the targets' frequencies are."""
    for step in looked(ratio=1e-2, loss=stuck_at(3.0), count=140, unigram=3.0):
        if step.step.step == 0 and first is not None:
            step = replace(step, signals=replace(step.signals, first=first))
        yield step


def test_masked_words_may_stay_where_frequencies_are() -> None:
    assert "GS206" in run(stuck_steps())
    assert "GS206" not in run(stuck_steps(MASKED))


def rated(rate: Callable[[int], float], count: int = 100) -> Steps:
    return (observed(number, jittered(number), lr=rate(number)) for number in range(count))


DECAYED = (GroupSettings("AdamW 0", 1e-3, 0.3),)
TWO_RATES = (GroupSettings("AdamW 0", 1e-3), GroupSettings("AdamW 0", 1e-5))
UNLIKE = np.array([1e-3, 1e-3, 1e-5, 1e-3, 1e-3, 1e-3])
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
    ("GS109", lambda: run(usual(loss=float("nan"))), lambda: run(usual(loss=1.0))),
    ("GS201", lambda: run(with_one(40, 30.0)), lambda: run(with_one(40, 5.0))),
    ("GS202", lambda: run(of(lambda n: 1.05**n, 120), {"GS101": False}), lambda: run(of(lambda n: 0.001 * 1.05**n, 120), {"GS105": False})),
    ("GS203", lambda: run(losing(lambda n: FALLING[n], lambda n: 2.3)), lambda: run(losing(lambda n: FALLING[n], lambda n: FALLING[n]))),
    ("GS204", lambda: run(of(lambda n: DEEP * jittered(n))), lambda: run(of(lambda n: DEEP ** 0.4 * jittered(n)))),
    ("GS205", lambda: run(looked(dead=0.8)), lambda: run(looked(dead=0.3))),
    ("GS206", lambda: run(looked(ratio=1e-2, loss=stuck_at(3.0), count=140, unigram=3.0)), lambda: run(looked(ratio=1e-2, loss=stuck_at(2.0), count=140, unigram=3.0))),
    ("GS207", lambda: routed([1, 1, 0, 1]), lambda: routed(lambda n: [1, 1, n != 20, 1])),
    ("GS208", lambda: routed([1, 1, 0.03, 1], 260), lambda: routed([1, 1, 0.1, 1], 260)),
    ("GS301", lambda: run(of(lambda n: [1, 1, 0, 1, 1, jittered(n)])), lambda: run(of(lambda n: [1, 1, 0, 1, 1, jittered(n)]), memberships=HOLE)),
    ("GS302", lambda: run(looked(), memberships=HOLE), lambda: run(looked(), memberships=None)),
    ("GS303", lambda: run(looked(), memberships=[1, 2, 1, 1, 1, 1]), lambda: run(looked())),
    ("GS304", lambda: run(looked(ratio=[1e-3, 0, 1e-3, 1e-3, 1e-3, 1e-3])), lambda: run(looked(ratio=lambda n: 1e-3 if n < 20 else 0.0, lr=0.0))),
    ("GS305", lambda: run(usual(uncleared=True)), lambda: run(usual(uncleared=False))),
    ("GS306", lambda: with_networks(UnmovedNetwork("critic", 4, 3)), lambda: with_networks()),
    ("GS307", lambda: run(usual(), frozen_adapters=(0, 1)), lambda: run(usual())),
    ("GS401", lambda: run(looked(ratio=0.9)), lambda: run(looked(ratio=[0.9, 0.01, 0.01, 0.01, 0.01, 0.01]))),
    ("GS402", lambda: run(looked(ratio=1e-9)), lambda: run(looked(ratio=1e-5))),
    ("GS403", lambda: run(looked(tiny=0.5, zero=0.3), half=[True] * 6), lambda: run(looked(tiny=0.5, zero=0.3))),
    ("GS404", lambda: run(usual(scale=0.5, skipped=True)), lambda: run(with_one(3, 1.0, scale=32768.0, skipped=True))),
    ("GS405", lambda: run(of(jittered, 120, clip_coef=0.01)), lambda: run(of(jittered, 120, clip_coef=0.5))),
    ("GS406", lambda: run(looked(), groups=DECAYED, group_of=(0,) * 6), lambda: run(looked(), groups=(GroupSettings("AdamW 0", 1e-3, 1e-3),), group_of=(0,) * 6)),
    ("GS407", lambda: run(rated(lambda n: 0.7**n)), lambda: run(rated(lambda n: 0.5 + 0.5 * np.cos(np.pi * n / 100)))),
    ("GS408", lambda: run(looked(ratio=UNLIKE), groups=TWO_RATES, group_of=(0, 0, 1, 0, 0, 0)), lambda: run(looked(ratio=np.sort(UNLIKE)), groups=TWO_RATES, group_of=(1, 0, 0, 0, 0, 0))),
    ("GS409", lambda: run(usual(scaled_limit=1.0, scale=65536.0)), lambda: run(usual(scaled_limit=65536.0, scale=65536.0))),
    ("GS501", lambda: run(of(lambda n: 1.0)), lambda: run(usual())),
    ("GS502", lambda: run(usual(alike_batches=9)), lambda: run(usual(alike_batches=3))),
    ("GS503", lambda: compared(lambda n: [jittered(n), 20 * jittered(n + 1)]), lambda: compared(lambda n: [jittered(n), 3 * jittered(n + 1)])),
    ("GS504", lambda: digested(same_weights=False), lambda: digested(same_weights=False, same_start=False)),
    ("GS505", lambda: digested(same_batch=True, parallel="ddp"), lambda: digested(same_batch=True, parallel="other")),
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
    ("GS612", lambda: began(shifted_twice=DoubleShift(1.0, True)), lambda: began(shifted_twice=None)),
    ("GS613", lambda: began(padding=PaddingLabels(20, 20, 60, 0)), lambda: began(padding=PaddingLabels(20, 0, 40, 0))),
    ("GS614", lambda: began(samples=SampleLabels(4, 3, 96, 20)), lambda: began(samples=SampleLabels(4, 2, 24, 3))),
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


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({"clip_coef": 2e-5}, "critical"),
        ({"clip_coef": 0.5}, "warning"),
        ({"clip_coef": 1.0}, None),
        ({"scaled_limit": 700.0}, None),
        ({"scale": 1.0}, None),
        ({"scaled_limit": float("inf")}, None),
    ],
)
def test_clipping_of_scaled_gradients(changes: dict[str, float], severity: str | None) -> None:
    found = run(usual(**{"scaled_limit": 1.0, "scale": 65536.0} | changes)).get("GS409")
    assert (found and found.severity) == severity


def test_clipping_of_scaled_gradients_is_a_warning_where_adam_hides_it() -> None:
    steps = usual(scaled_limit=1.0, scale=65536.0, clip_coef=2e-5)
    assert run(steps, normalising=True)["GS409"].severity == "warning"


EQUAL = FirstStep(constant=ConstantLoss("mse_loss", "equal", "train.py:8"))


def zero_steps(first: FirstStep | None = None, norm: float = 0.0, count: int = 60) -> Steps:
    """Steps whose loss and gradient are zero, or next to it."""
    for number in range(count):
        yield observed(number, norm, loss=norm, first=None if number else first)


def test_a_loss_of_zero_from_the_first_step_on_is_found() -> None:
    found = run(zero_steps())["GS106"]
    assert (found.severity, found.first_step, found.made_step) == ("critical", 0, 19)
    assert "GS106" not in run(zero_steps(count=19))


def test_a_loss_of_zero_is_found_at_once_where_the_reason_is_known() -> None:
    found = run(zero_steps(EQUAL, count=3))["GS106"]
    assert "mse_loss at train.py:8 is given an output that equals its target" in found.evidence
    assert "GS106" not in run(zero_steps(EQUAL, count=2))
    # What rounding leaves is nothing, too; what is larger is a gradient.
    assert "GS106" in run(zero_steps(EQUAL, norm=1e-8))
    assert "GS106" not in run(zero_steps(EQUAL, norm=1e-5))


@pytest.mark.parametrize("begins", [1, 19])
def test_a_loss_that_reaches_zero_is_left_alone(begins: int) -> None:
    """A margin that is reached, and one that the first batches keep by chance."""
    now = (float(number in (begins, begins + 1)) for number in range(90))
    steps = (observed(number, norm, loss=norm) for number, norm in enumerate(now))
    assert "GS106" not in run(steps)


def test_labels_that_are_few_by_design_are_left_alone() -> None:
    """In masked language modelling of short texts most samples can be without a label."""
    assert "GS614" not in began(samples=SampleLabels(16, 9, 64, 9))


def test_padding_that_hardly_counts_is_left_alone() -> None:
    assert "GS613" not in began(padding=PaddingLabels(40, 6, 60, 0))
    assert "GS613" not in began(padding=PaddingLabels(6, 6, 600, 0))


@pytest.mark.parametrize(("by_model", "severity"), [(True, "critical"), (False, "warning")])
def test_a_double_shift_is_critical_where_the_model_shifts(by_model: bool, severity: str) -> None:
    found = began(shifted_twice=DoubleShift(1.0, by_model))["GS612"]
    assert found.severity == severity
    assert ("the model shifts them" in found.evidence) is by_model


def long_tailed(number: int) -> float:
    """High norms come now and then, as at the ends of episodes."""
    return jittered(number) * (8 if number % 17 == 11 else 1) * (20 if number == 50 else 1)


def test_a_jump_is_no_spike_where_high_norms_are_usual() -> None:
    assert "GS201" not in run(of(long_tailed))
    assert "GS201" in run(of(lambda n: jittered(n) * (20 if n == 50 else 1)))
    assert "GS201" in run(of(lambda n: long_tailed(n) * (3 if n == 50 else 1)))


def test_high_norms_of_the_first_steps_hide_no_spike() -> None:
    for at in (45, 51, 55, 59, 60):
        norms = [9.0 if n < 10 else jittered(n) * (20 if n == at else 1) for n in range(70)]
        assert "GS201" in run(of(norms.__getitem__, len(norms))), at


@pytest.mark.parametrize(
    ("parallel", "same_gradient", "severity"),
    [
        (None, False, "critical"),
        (None, True, "critical"),
        ("uncalled ddp", False, "critical"),
        ("ddp", True, "warning"),
        ("ddp", False, None),
        ("ddp", None, None),
        ("loose ddp", False, None),
        ("loose ddp", True, None),
        ("fsdp", True, None),
        ("other", True, None),
    ],
)
def test_ranks_that_drift_apart(
    parallel: str | None, same_gradient: bool | None, severity: str | None
) -> None:
    found = digested(same_weights=False, same_gradient=same_gradient, parallel=parallel)
    assert (found["GS504"].severity if "GS504" in found else None) == severity


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


def one_dies(number: int) -> list[float]:
    """Six layers, of which one loses its gradient slowly."""
    norms = [0.03 * jittered(number)] * 6
    norms[2] = 2.4e-2 * 10 ** (-number / 100)
    return norms


def test_one_layer_that_dies_is_named_without_any_loss() -> None:
    finding = run(of(one_dies, 600))["GS203"]
    assert finding.parameters == ("blocks.2.weight",)
    assert "while the whole went from" in finding.evidence


@pytest.mark.parametrize(
    "norms",
    [
        lambda n: np.array(one_dies(n)) * 10.0 ** (-n / 100),
        lambda n: [0.03 * jittered(n)] * 5 + [0.03 * jittered(n) if n < 200 else 0.0],
        lambda n: [0.03 * jittered(n), 0.03 * 10 ** (-n / 400), *[0.03] * 4],
    ],
    ids=["all of them fade", "an expert that waits", "a little less"],
)
def test_what_only_looks_like_a_dying_layer(norms: Callable[[int], Any]) -> None:
    assert "GS203" not in run(of(norms, 600), {"GS105": False})


def grown(factor: float) -> Callable[[int], float]:
    """Weights that grow by so much within thirty steps."""
    return lambda number: 0.2 * (1 + (factor - 1) * min(1.0, number / 30))


@pytest.mark.parametrize(
    ("factor", "loss", "expected"),
    [
        (8.0, lambda n: 4.0 - 0.5 * min(1, n / 20), True),
        (2.0, lambda n: 4.0 - 0.5 * min(1, n / 20), False),
        (8.0, lambda n: 4.0 * 0.95**n, False),
    ],
    ids=["blown up", "a little", "solved"],
)
def test_weights_that_are_blown_up(
    factor: float, loss: Callable[[int], float], expected: bool
) -> None:
    found = run(looked(ratio=1e-2, rms=grown(factor), loss=loss))
    assert ("GS401" in found) == expected
    # What starts far smaller than torch would make it has to grow.
    small = run(looked(ratio=1e-2, rms=lambda n: 0.1 * grown(factor)(n), loss=loss))
    assert "GS401" not in small


@pytest.mark.parametrize("loss", [lambda n: 5000 * 0.99**n, lambda n: 5000.0 + n])
def test_a_large_norm_that_is_a_unit(loss: Callable[[int], float]) -> None:
    """Large from the start, short steps, and a loss that falls: a sum."""
    steps = list(looked(ratio=1e-2, loss=loss, count=80))
    large = [
        replace(each, norms=Norms(each.norms.l2 * 3000, each.norms.max_abs, None, 7000.0 + number))
        for number, each in enumerate(steps)
        if each.norms is not None
    ]
    found = run(iter(large), normalising=True)
    assert ("GS102" in found) == (loss(60) > 5000)


def test_a_norm_that_has_grown_is_no_unit() -> None:
    steps = looked(ratio=1e-2, loss=lambda n: 5000 * 0.99**n, count=80)
    grows = [
        replace(each, norms=Norms(each.norms.l2, each.norms.max_abs, None, 50.0 * 1.1**number))
        for number, each in enumerate(steps)
        if each.norms is not None
    ]
    assert "GS102" in run(iter(grows), normalising=True)


def test_wrong_groups_and_right_ones() -> None:
    layer_wise = tuple(GroupSettings("AdamW 0", 1e-3 * 0.4**depth) for depth in range(6))
    rates = np.array([group.lr for group in layer_wise])
    assert "GS408" not in run(looked(ratio=rates), groups=layer_wise, group_of=tuple(range(6)))
    two = (GroupSettings("Muon 0", 2e-2), GroupSettings("AdamW 1", 2e-3))
    found = run(looked(ratio=UNLIKE), groups=two, group_of=(0, 0, 1, 0, 0, 0))["GS408"]
    assert found.parameters == ("blocks.2.weight",)
    assert "100 times less" in found.evidence
    adapters = [f"blocks.{block}.lora_{half}.weight" for block in range(3) for half in "AB"]
    faster = (GroupSettings("AdamW 0", 1e-4), GroupSettings("AdamW 0", 16e-4))
    ratio = np.array([1e-4, 16e-4] * 3)
    plus = run(looked(ratio=ratio), names=adapters, groups=faster, group_of=(0, 1) * 3)
    assert "GS408" not in plus


def test_weights_that_are_drawn_anew() -> None:
    found = run(looked(alike=0.02))["GS304"]
    assert "not those that the step before had left" in found.evidence
    assert "anew" in found.recommendation
    assert "GS304" not in run(looked(alike=0.8))
