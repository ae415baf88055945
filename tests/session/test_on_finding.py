"""What on_finding takes."""

import pytest

from gradsight.errors import GradsightError
from gradsight.health import judge  # files the checks
from gradsight.session.on_finding import finding_actions
from gradsight.values.findings import Finding

assert judge


def finding(code: str = "GS103", severity: str = "critical") -> Finding:
    return Finding(code, "name", severity, (), 3, "seen", "means", "do", "code")


def called(found: Finding) -> None:
    """An action of the user's."""


def test_a_code_goes_before_a_severity() -> None:
    actions = finding_actions({"GS103": "stop", "critical": "alert", "warning": [called, "stop"]})
    assert actions is not None
    assert actions.of(finding("GS103")) == ("stop",)
    assert actions.of(finding("GS104")) == ("alert",)
    assert actions.of(finding("GS201", "warning")) == (called, "stop")
    assert actions.includes("alert")
    assert not actions.includes("skip")


def test_one_action_is_for_every_finding() -> None:
    for given in ("stop", ["stop"], ("stop",)):
        actions = finding_actions(given)
        assert actions is not None
        assert actions.of(finding()) == actions.of(finding("GS201", "warning")) == ("stop",)
    assert finding_actions(None) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("halt", "'halt' is no action"),
        (3, "3 is no action"),
        ([], "without an action"),
        (["stop", None], "None is no action"),
        ({"GS999": "stop"}, "no code or severity 'GS999'"),
        ({"fatal": "stop"}, "no code or severity 'fatal'"),
        ({7: "stop"}, "no code or severity 7"),
        ({"GS201": "skip"}, "cannot be done for GS201"),
        ({"warning": "skip"}, "cannot be done for warning"),
        ("ftp://somewhere", "this text is no action"),
        (b"stop", "a bytes is no action"),
        ("https://hooks.example", "this text is no action"),
        ({"GS103": {"GS104": "stop"}}, "is no action"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: object, words: str) -> None:
    with pytest.raises(GradsightError, match=words):
        finding_actions(given)


def test_skip_is_for_gradients_that_are_not_finite() -> None:
    for given in ("skip", {"GS103": "skip"}, {"GS104": ["alert", "skip"]}, {"critical": "skip"}):
        actions = finding_actions(given)
        assert actions is not None
        assert actions.includes("skip")


@pytest.mark.parametrize(
    "given",
    [
        "https://hooks.example/XXXX",
        "htps://hooks.example/XXXX",
        "hooks.example/XXXX",
        "https://[XXXX",
        {"GS103": {"critical": "https://hooks.example/XXXX"}},
        {"https://hooks.example/XXXX": "GS103"},
        [["https://hooks.example/XXXX"]],
    ],
)
def test_an_address_is_refused_and_not_repeated(given: object) -> None:
    with pytest.raises(GradsightError) as refusal:
        finding_actions(given)
    assert "XXXX" not in str(refusal.value)


def test_the_record_names_callables() -> None:
    actions = finding_actions({"critical": ["stop", called]})
    assert actions is not None
    assert actions.for_the_record() == {"critical": ["stop", "called"]}
