"""How facts become findings: patience, hysteresis, baselines that incidents do not spoil, settings,
abstaining.
"""

from pathlib import Path

import numpy as np
import pytest

from gradsight.errors import UsageError
from gradsight.health.baseline import Baseline, logarithms
from gradsight.health.judge import Judge
from gradsight.health.registry import chosen
from gradsight.values.findings import Finding
from health.test_checks import NAMES, jittered, observed, run, subject


def test_patience_waits_and_names_the_first_step() -> None:
    judge = Judge(subject())
    for number, norm in enumerate([1.0, 90.0, 90.0, 1.0, 1.0, 90.0, 90.0]):
        judge.observe(observed(number, norm))
    assert judge.findings() == []
    judge.observe(observed(7, 90.0))
    assert [(finding.code, finding.first_step) for finding in judge.findings()] == [("GS101", 5)]


def test_one_finding_per_code_counts_its_incidents() -> None:
    told: list[Finding] = []
    judge = Judge(subject(), chosen({"GS101": False}))
    for number in range(90):
        norm = 50.0 if number in (30, 60, 61, 85) else jittered(number)
        told += judge.observe(observed(number, norm))
    told += judge.finish()
    assert {finding.code for finding in told} == {"GS201"}
    assert [finding.first_step for finding in judge.findings()] == [30]
    assert "3 times in all" in judge.findings()[0].evidence


def test_ordinary_logarithms_are_those_of_any_numbers() -> None:
    norms = np.exp(np.random.default_rng(0).normal(size=50) * 5)
    assert logarithms(norms, 3.0, ordinary=True).tolist() == logarithms(norms, 3.0).tolist()
    assert logarithms(np.array([np.nan, np.inf, 0.0]), 1.0).tolist() == [-100.0, 700.0, -100.0, 0.0]


def test_a_baseline_never_takes_in_what_is_not_finite() -> None:
    baseline = Baseline()
    for number in range(60):
        bad = number % 7 == 3
        baseline.enter(
            logarithms(np.array([np.nan if bad else 1.0]), np.nan if bad else 1.0),
            not bad,
        )
    assert baseline.median is not None
    assert baseline.median.tolist() == [0.0, 0.0]
    bound = baseline.bound(10.0, 8.0, 2)
    assert bound is not None
    assert bound.tolist() == pytest.approx([np.log(10)] * 2)


def test_a_nan_does_not_hide_the_spike_behind_it() -> None:
    judge = Judge(subject())
    for number in range(60):
        norm = np.nan if number == 40 else 1e4 if number == 42 else jittered(number)
        judge.observe(observed(number, norm))
    assert {"GS103", "GS201"} <= {finding.code for finding in judge.findings()}


def test_an_incident_does_not_become_the_baseline_but_a_new_level_does() -> None:
    baseline = Baseline()
    for _ in range(30):
        baseline.enter(np.zeros(2), True)
    for _ in range(20):
        baseline.enter(np.full(2, 4.6), True)
    assert baseline.median is not None
    assert baseline.median[0] == 0.0
    for _ in range(30):
        baseline.enter(np.full(2, 4.6), True)
    assert baseline.median.tolist() == [4.6, 4.6]


def test_settings_tune_and_silence() -> None:
    steps = [observed(number, 80.0 + number) for number in range(20)]
    assert "GS101" in run(iter(steps))
    assert "GS101" not in run(iter(steps), {"GS101": {"limit": 500}})
    assert "GS101" not in run(iter(steps), {"GS101": False})


def test_settings_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "health.toml"
    file.write_text("GS405 = false\n[GS101]\nlimit = 500\n")
    settings = {each.check.code: each.thresholds for each in chosen(file)}
    assert "GS405" not in settings
    assert settings["GS101"]["limit"] == 500


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"GS999": False}, "there is no check 'GS999'; there are GS101, GS102"),
        (
            {"GS101": {"limt": 1}},
            r"GS101 \(large gradient\) has no setting 'limt'; it has limit=100.0",
        ),
        ({"GS101": {"limit": "much"}}, "GS101: limit must be a number, got 'much'"),
        ({"GS101": 3}, "the settings of GS101 must be False or a mapping, got 3"),
        (7, "health must be True, False, .* got int"),
        ("nowhere.toml", "the health settings nowhere.toml cannot be read"),
    ],
)
def test_wrong_settings_are_refused(settings: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        chosen(settings)


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "health.toml"
    file.write_text("GS101: off")
    with pytest.raises(UsageError, match="are not TOML"):
        chosen(file)


def test_a_check_without_its_signal_abstains_and_says_so() -> None:
    judge = Judge(subject(memberships=None))
    judge.observe(observed(0, 1.0))
    reasons = {each.code: each.reason for each in judge.abstentions()}
    assert reasons["GS302"] == "no optimizer is known: give it to watch(model, optimizer)"
    assert reasons["GS404"] == "no GradScaler is in use"
    assert "GS101" not in reasons


def test_the_layers_of_a_nan_are_told_in_backward_order() -> None:
    norms = np.array([np.nan, np.nan, np.nan, 1.0, 1.0, 1.0])
    finding = run(iter([observed(0, norms)]))["GS103"]
    assert finding.parameters == tuple(NAMES[2::-1])
    assert "backward is clean down to blocks.3.weight" in finding.evidence
