"""Who gets an answer: this address, reading only, with the token, and nothing outside the folder."""

import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import gradsight
import warm
from show.serve.served import Server, serving

SECRET = "nobody must read this"


def record(folder: Path, steps: range, diverges: bool = False) -> None:
    """Record a run whose last loss is NaN if it diverges."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer, run_dir=folder, quiet=True, recorder=False) as watched:
        for step in steps:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().mean()
            if diverges and step == steps[-1]:
                loss = loss * float("nan")
            loss.backward()
            optimizer.step()
            watched.log(loss=loss)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two runs, one further down, links that lead out, and what lies beside."""
    place = tmp_path_factory.mktemp("door")
    runs = place / "runs"
    record(runs / "first", range(20))
    record(runs / "more" / "second", range(5), diverges=True)
    record(place / "outside", range(3))
    (place / "secret.txt").write_text(SECRET)
    (runs / "first" / "secret.txt").write_text(SECRET)
    (runs / "out").symlink_to(place / "outside")
    (runs / "inside").symlink_to(runs / "first")
    (runs / "loop").symlink_to(runs / "loop")
    (runs / "up").symlink_to(runs)
    (runs / "lone").mkdir()
    (runs / "lone" / "run.sqlite").symlink_to(place / "outside" / "run.sqlite")
    with serving(runs, place / "cache") as server:
        yield server


def test_it_says_where_and_how_to_get_there_from_elsewhere(server: Server) -> None:
    assert f"ssh -L {server.port}:127.0.0.1:{server.port} " in server.lines[1]


def test_it_listens_on_this_machine_only(server: Server) -> None:
    loopback = f"0100007F:{server.port:04X}"
    listening = "0A"
    for file in ("tcp", "tcp6"):
        for line in Path("/proc/net", file).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == listening and local.endswith(f":{server.port:04X}"):
                assert local == loopback


@pytest.mark.parametrize(
    ("headers", "query", "code"),
    [
        ({}, "?token={token}", 200),
        ({"Cookie": "gradsight-{port}={token}"}, "", 200),
        ({"Cookie": "a=b; gradsight-{port}={token}; c=d"}, "", 200),
        ({"Host": "localhost:{port}"}, "?token={token}", 200),
        ({}, "", 403),
        ({}, "?token=", 403),
        ({}, "?token={token}x", 403),
        ({}, "?token={token}&token=x", 403),
        ({}, "?Token={token}", 403),
        ({"Cookie": "gradsight-{port}=wrong"}, "", 403),
        ({"Cookie": "gradsight={token}"}, "", 403),
        ({"Cookie": "gradsight-{port}=\xe9"}, "", 403),
        ({"Authorization": "Bearer {token}"}, "", 403),
        ({"Host": "evil.example"}, "?token={token}", 421),
        ({"Host": "evil.example:{port}"}, "?token={token}", 421),
        ({"Host": "127.0.0.1"}, "?token={token}", 421),
        ({"Host": "127.0.0.1:1"}, "?token={token}", 421),
        ({"Host": "127.0.0.1.evil.example:{port}"}, "?token={token}", 421),
        ({"Host": ""}, "?token={token}", 421),
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/runs", "/run/first/", "/run/first/api/events"])
def test_only_who_has_the_token_is_answered(
    server: Server, path: str, headers: dict[str, str], query: str, code: int
) -> None:
    known = {"token": server.token, "port": server.port}
    given = {name: value.format(**known) for name, value in headers.items()}
    # HEAD: an event stream has no end.
    answer = server.ask(path + query.format(**known), "HEAD", given)
    assert answer.status == code
    assert ("Set-Cookie" in answer.headers) == (code == 200 and "Cookie" not in given)


def test_a_request_without_a_host_is_refused(server: Server) -> None:
    assert 400 <= server.ask(f"/?token={server.token}", headers={"Host": None}).status < 500


def test_the_first_answer_brings_a_cookie_that_will_do(server: Server) -> None:
    answer = server.ask(f"/?token={server.token}")
    cookie = answer.headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert server.ask("/", headers={"Cookie": cookie.split(";")[0]}).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "WHAT"])
def test_it_is_only_read_from(server: Server, method: str) -> None:
    for path in (f"/?token={server.token}", f"/run/first/api/data?token={server.token}"):
        assert server.ask(path, method).status == 405


def test_nobody_elses_page_may_read_an_answer(server: Server) -> None:
    for path in ("/", "/api/runs", "/run/first/api/data", "/nowhere"):
        headers = {
            "Origin": "http://evil.example",
            "Cookie": f"gradsight-{server.port}={server.token}",
        }
        answer = server.ask(path, headers=headers)
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


ESCAPES = [
    "/../secret.txt",
    "/%2e%2e/secret.txt",
    "/run/../../secret.txt",
    "/run/..%2f..%2fsecret.txt",
    "/run/%2e%2e/%2e%2e/outside/",
    "/run/../outside/",
    "/run/first/../../outside/",
    "/run/first/secret.txt",
    "/run/first/run.sqlite",
    "/run//etc/passwd",
    "/run/%2fetc/",
    "/run/./",
    "/run/",
    "/run/out/",
    "/run/out/api/data",
    "/run/lone/",
    "/run/loop/",
    "/run/up/",
    "/run/first%00/",
    "/run/" + "x" * 5000 + "/",
    "//evil.example/",
    "/static/../../secret.txt",
    "/api",
    "/run/nowhere/api/events",
]


@pytest.mark.parametrize("path", ESCAPES)
def test_no_path_leads_out(server: Server, path: str) -> None:
    answer = server.get(path)
    assert 400 <= answer.status < 500, answer.status
    assert SECRET not in answer.text


@pytest.mark.parametrize(
    "query", ["factor=3", "factor=0", "factor=x", "from=x", "to=1e9", "factor=-8"]
)
def test_a_question_that_makes_no_sense_is_refused(server: Server, query: str) -> None:
    assert server.get(f"/run/first/api/heat?{query}").status == 400


def test_the_runs_inside_are_answered(server: Server) -> None:
    for name, last in (("first", 19), ("more/second", 4), ("inside", 19)):
        assert server.get(f"/run/{name}/").status == 200
        data = json.loads(server.get(f"/run/{name}/api/data").text)
        assert data["steps"]["last"] == last


def test_the_list_has_every_run_and_no_link_that_leads_out(server: Server) -> None:
    text = server.get("/").text
    found = dict(re.findall(r'data-run="([^"]*)" data-status="([^"]*)"', text))
    assert found == {"first": "healthy", "more/second": "critical", "inside": "healthy"}
    runs = json.loads(server.get("/api/runs").text)
    assert {run["name"]: run["status"] for run in runs} == found


@pytest.mark.slow
def test_a_thousand_quick_requests(server: Server) -> None:
    paths = ["/", "/api/runs", "/run/first/", "/run/first/api/heat", "/nowhere"]

    def ask(number: int) -> int:
        return server.get(paths[number % len(paths)]).status

    with ThreadPoolExecutor(16) as pool:
        codes = list(pool.map(ask, range(1000)))
    assert codes == [200, 200, 200, 200, 404] * 200
    assert server.memory() < 300e6
    assert server.get("/").status == 200


def test_what_cannot_be_served_is_wrong_usage(tmp_path: Path, server: Server) -> None:
    def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["-m", "gradsight", "serve", *arguments]
        return warm.run(command, capture_output=True, text=True)

    nowhere = serve(str(tmp_path / "nowhere"))
    taken = serve(str(tmp_path), "--port", str(server.port))
    beyond = serve(str(tmp_path), "--port", "70000")
    assert (nowhere.returncode, taken.returncode, beyond.returncode) == (64, 64, 64)
    assert "there is no folder" in nowhere.stderr
    assert "--port 0" in taken.stderr
    assert "Traceback" not in nowhere.stderr + taken.stderr + beyond.stderr
