"""The browser of the tests: a page that complains fails its test, and BROWSER=0 does without."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from browser import INSTALL, Visits

TREE = Path(__file__).parents[2]
SCRIPT = TREE / "scripts" / "browser.sh"
PAGE = "<!doctype html><html data-ready><title>t</title><script>{}</script></html>"


def page(folder: Path, script: str) -> str:
    file = folder / "page.html"
    file.write_text(PAGE.format(script))
    return file.as_uri()


@pytest.mark.slow
def test_a_quiet_page(visit: Visits, tmp_path: Path) -> None:
    shown = visit(page(tmp_path, "document.title = 'ran'"), viewport={"width": 390, "height": 800})
    assert shown.title() == "ran"
    assert shown.evaluate("innerWidth") == 390


@pytest.mark.parametrize(
    ("script", "errors", "strangers"),
    [
        ("console.error('oh')", 1, 0),
        ("null.x", 1, 0),
        ("new Image().src = 'other.png'", 1, 1),
        ("new Image().src = 'data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA='", 0, 0),
    ],
)
@pytest.mark.slow
def test_a_page_that_complains_or_asks_is_noticed(
    browser: Browser, tmp_path: Path, script: str, errors: int, strangers: int
) -> None:
    visits = Visits(browser)
    visits(page(tmp_path, script)).wait_for_load_state("networkidle")
    visits.close()
    assert len(visits.errors) == errors
    assert len(visits.strangers()) == strangers


@pytest.mark.slow
def test_other_tests_have_no_event_loop_of_the_browser() -> None:
    """Stands behind tests with the browser, whose own loop is still there."""
    asyncio.run(asyncio.sleep(0))


@pytest.mark.slow
def test_without_a_browser_the_summary_says_how_many() -> None:
    """In a worker, as `make test` has them, and so in the process itself."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", __file__]
    chosen = ["-k", "quiet or complains or event_loop", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *chosen],
        cwd=TREE,
        env={**os.environ, "BROWSER": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "BROWSER=0: 5 tests in a browser were left out" in done.stdout
    assert "1 passed" in done.stdout


def look(folder: Path, user: int, *names: str, wanted: str = "") -> str:
    """What the set-up says where the commands are these alone and `user` is at work."""
    for name in ("bash", "dirname", "mktemp", "rm", "cat"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    commands = dict.fromkeys(names, f'echo "$0 $*" >> {folder}/called')
    for name, text in {**commands, "id": f"echo {user}", "uname": "echo Linux"}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": str(folder), "BROWSER": wanted}
    done = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    called = folder / "called"
    if called.exists():
        lines = called.read_text().splitlines()
        assert [line.split("/")[-1] for line in lines] == ["apt-get update", INSTALL]
        return done.stdout
    assert "installing" not in done.stdout
    return done.stdout


def test_the_set_up_installs_what_is_missing_and_says_so_first(tmp_path: Path) -> None:
    said = look(tmp_path, 0, "apt-get")
    assert (tmp_path / "called").exists()
    assert said.splitlines()[0].startswith("chromium is missing")
    assert re.search(r"installing chromium \.\.\. \d+ s", said)


@pytest.mark.parametrize(("user", "names"), [(1000, ["apt-get"]), (0, [])])
def test_the_set_up_names_the_line_where_it_may_not(
    tmp_path: Path, user: int, names: list[str]
) -> None:
    assert INSTALL in look(tmp_path, user, *names)
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(("names", "wanted"), [(["apt-get", "chromium"], ""), (["apt-get"], "0")])
def test_the_set_up_leaves_alone_what_is_there_or_unwanted(
    tmp_path: Path, names: list[str], wanted: str
) -> None:
    assert look(tmp_path, 0, *names, wanted=wanted) == ""
    assert not (tmp_path / "called").exists()


def test_a_missing_browser_fails_the_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from browser import executable

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match=INSTALL):
        executable()
