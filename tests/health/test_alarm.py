"""The alarm goes off, before the update, at just those steps that the judge will find."""

import dataclasses
import math

import numpy as np
import pytest

from gradsight.health.alarm import Alarm
from gradsight.health.bad_steps import EarlyLook
from gradsight.health.judge import Judge
from gradsight.health.registry import CHECKS, AsIncident, chosen
from gradsight.values.measured import Norms
from health.test_checks import jittered, observed, subject

SEQUENCES = {
    "calm": [jittered(number) for number in range(80)],
    "a spike": [30.0 if number == 40 else jittered(number) for number in range(80)],
    "two spikes": [30.0 if number in (30, 60) else jittered(number) for number in range(80)],
    "a new level": [jittered(number) * (50.0 if number > 40 else 1.0) for number in range(90)],
    "early": [100.0 if number == 5 else jittered(number) for number in range(40)],
    "exploding": [jittered(number) * (1e4 if number > 30 else 1.0) for number in range(60)],
    "NaN": [math.nan if number == 20 else jittered(number) for number in range(60)],
    "a stretch of NaN": [math.nan if 20 <= n < 30 else jittered(n) for n in range(60)],
    "Inf": [math.inf if number == 20 else jittered(number) for number in range(60)],
    "NaN, then a spike": [
        math.nan if number == 40 else 40.0 if number == 42 else jittered(number)
        for number in range(80)
    ],
}
ALARMING = ("GS102", "GS103", "GS104", "GS201")


def norms_of(value: float) -> Norms:
    measured = observed(0, value).norms
    assert measured is not None
    return measured


def alarms(values: list[float], settings: object = True) -> list[tuple[int, str]]:
    """Every alarm, with its step."""
    alarm = Alarm(chosen(settings))
    raised = []
    for number, value in enumerate(values):
        norms = norms_of(value)
        code = alarm.not_finite(norms, scaled=False, nan_loss=True) or alarm.too_large(norms, None)
        if code is not None:
            raised.append((number, code))
        alarm.end_step(norms)
    return raised


def judged(values: list[float], settings: object = True) -> dict[str, int]:
    """By code: the first step at which the judge finds what an alarm can know."""
    judge = Judge(subject(), chosen(settings))
    first: dict[str, int] = {}
    for number, value in enumerate(values):
        for finding in judge.observe(observed(number, value)):
            if finding.code in ALARMING:
                first.setdefault(finding.code, number)
    return first


@pytest.mark.parametrize("name", SEQUENCES)
def test_alarm_and_judge_agree(name: str) -> None:
    raised = alarms(SEQUENCES[name])
    first = {code: min(step for step, other in raised if other == code) for _, code in raised}
    found = judged(SEQUENCES[name])
    if "GS102" in found:  # the jump to it is a spike as well, and one step has one alarm
        assert first.pop("GS201", found["GS201"]) == found.pop("GS201")
    assert first == found


def test_the_table_holds_every_alarm() -> None:
    declared = {code for code, check in CHECKS.items() if check.incident.alarm is not None}
    assert declared == set(ALARMING)
    assert {code for values in SEQUENCES.values() for _, code in alarms(values)} == declared


def test_a_stretch_of_bad_steps_is_one_alarm() -> None:
    assert alarms(SEQUENCES["a stretch of NaN"]) == [(20, "GS103")]


def test_a_silenced_check_raises_no_alarm() -> None:
    assert alarms(SEQUENCES["a spike"], {"GS201": False}) == []


def test_thresholds_are_the_checks_own() -> None:
    assert alarms(SEQUENCES["a spike"], {"GS201": {"factor": 100.0}}) == []
    assert alarms([20.0] * 5, {"GS102": {"limit": 10.0, "patience": 2}}) == [(1, "GS102")]


def test_norms_of_several_optimizers_tell_only_what_is_not_finite() -> None:
    alarm = Alarm(chosen(True), whole_norms=False)
    for number in range(30):
        alarm.end_step(norms_of(jittered(number)))
    assert alarm.too_large(norms_of(1e6), None) is None
    assert alarm.not_finite(norms_of(math.nan), scaled=False, nan_loss=True) == "GS103"


def test_a_scaler_is_trusted_for_a_while() -> None:
    alarm = Alarm(chosen(True))
    codes = []
    for _ in range(12):
        codes.append(alarm.not_finite(norms_of(math.inf), scaled=True, nan_loss=False))
        alarm.end_step(norms_of(math.inf))
    assert codes.index("GS104") == 8
    assert codes.count(None) == 11


def test_a_new_check_can_declare_itself_an_incident(monkeypatch: pytest.MonkeyPatch) -> None:
    def above_two(look: EarlyLook, **_: float) -> bool:
        return bool(np.isfinite(look.norms.total)) and look.norms.total > 50.0

    check = dataclasses.replace(CHECKS["GS101"], incident=AsIncident(alarm=above_two))
    monkeypatch.setitem(CHECKS, "GS101", check)
    values = [jittered(number) for number in range(20)] + [80.0] * 5
    assert (22, "GS101") in alarms(values, {"GS201": False})
