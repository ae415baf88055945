"""What on_finding takes, and where its addresses are not told."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from gradsight.core.problems import Problems
from gradsight.errors import GradsightError, GradsightWarning
from gradsight.health import judge  # files the checks
from gradsight.session import webhook
from gradsight.session.on_finding import finding_actions
from gradsight.session.webhook import Webhook
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
        ("http://[::1", "an address without a host"),
        ("http://", "an address without a host"),
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
        "htps://hooks.example/XXXX",
        "hooks.example/XXXX",
        "https://[XXXX",
        {"GS103": {"critical": "https://hooks.example/XXXX"}},
        {"https://hooks.example/XXXX": "GS103"},
        [["https://hooks.example/XXXX"]],
    ],
)
def test_a_mistyped_address_is_not_repeated(given: object) -> None:
    with pytest.raises(GradsightError) as refusal:
        finding_actions(given)
    assert "XXXX" not in str(refusal.value)


def test_an_address_is_a_secret() -> None:
    secret = "https://hooks.example/T0/B0/XXXX"
    actions = finding_actions({"critical": [secret, called]})
    assert actions is not None
    assert actions.addresses == [secret]
    assert actions.for_the_record() == {"critical": ["an address", "called"]}


class Receiver(BaseHTTPRequestHandler):
    """Answers with the codes it is told, then with 200."""

    answers: list[int]
    received: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(json.loads(body))
        self.send_response(self.answers.pop(0) if self.answers else 200)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    monkeypatch.setattr(webhook, "_PAUSE", 0.0)
    Receiver.answers = []
    Receiver.received = []
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def address_of(server: HTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}/secret"


def test_a_finding_is_posted_once(receiver: HTTPServer) -> None:
    problems = Problems()
    posts = Webhook(problems)
    posts.post(address_of(receiver), {"code": "GS103"})
    posts.close()
    assert Receiver.received == [{"code": "GS103"}]
    assert problems.all() == []


def test_there_are_three_tries(receiver: HTTPServer) -> None:
    problems = Problems()
    posts = Webhook(problems)
    Receiver.answers = [500, 503]
    posts.post(address_of(receiver), {"code": "GS103"})
    posts.close()
    assert len(Receiver.received) == 3
    assert problems.all() == []


@pytest.mark.parametrize("answer", [500, 404, 302])
def test_a_failure_is_told_without_the_address(receiver: HTTPServer, answer: int) -> None:
    problems = Problems()
    posts = Webhook(problems)
    Receiver.answers = [answer] * 9
    with pytest.warns(GradsightWarning, match=f"GS103 .* in 3 tries: the answer was {answer}"):
        posts.post(address_of(receiver), {"code": "GS103"})
        posts.close()
    assert len(Receiver.received) == 3
    assert "secret" not in problems.all()[0].message


def test_nobody_at_the_address_is_told_too(receiver: HTTPServer) -> None:
    problems = Problems()
    posts = Webhook(problems)
    with pytest.warns(GradsightWarning, match="URLError"):
        posts.post("http://127.0.0.1:1/secret", {"code": "GS104"})
        posts.close()
    assert "secret" not in problems.all()[0].message
    assert "127" not in problems.all()[0].message
