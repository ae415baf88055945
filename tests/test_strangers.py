"""A stranger's run: nothing in it steers a terminal, writes structure into a report, or is changed
by looking at it.
"""

import hashlib
import os
import pty
import re
import stat
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import warm
from gradsight.cli import main
from hostile import hostile_run

STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
EVERYTHING = (
    "\x1b]52;c;aGk=\x07\x1b[2J\x9b31m\x1b]8;;http://e.vil\x1b\\x\x1b]8;;\x1b\\\u202egnp\x7f\x85"
    "\n\n# Heading\r\n\n<script>alert(1)</script>\u2028<!-- \n```\n| a | b |\n|---|---|\n| c | d |\n"
    "[x](http://e.vil) ![y](z) `c|` ``d`` **b**\n\n    code\n\n[ref]: http://e.vil\n---\n[red]m[/]"
)
TEXTS = {
    "everything": EVERYTHING,
    "heading": "# h",
    "item": "- - 1. i",
    "number": "1. n",
    "quote": "> q",
    "fence": "```\nx",
    "tildes": "~~~\nx",
    "table": "| a | b |",
    "html": "<img src=x onerror=alert(1)>",
    "entity": "&lt;b&gt; \\<b> \\\\<b>",
    "reference": "[a]: http://e.vil",
    "link": "](http://e.vil) [x](y) <http://e.vil> [a][b]",
    "markup": "[bold]x[/] [link=http://e.vil]y[/link] [/]",
}


def commands(run: Path) -> list[list[str]]:
    """Every command that reads a run, in every form that shows other texts."""
    incident = next((run / "incidents").iterdir())
    return [
        ["report", str(run)],
        ["report", str(run), "--json"],
        ["findings", str(run)],
        ["findings", str(run), "--json"],
        ["influence", str(run)],
        ["influence", str(run), "--by", "domain"],
        ["influence", str(run), "--json"],
        ["compare", str(run), str(run)],
        ["dump", "list", str(run)],
        ["dump", "show", str(run)],
        ["dump", "show", str(run), "--parameter", "*weight"],
        ["dump", "show", str(run), "--parameter", "nothing"],
        ["dump", "verify", str(run)],
        ["dump", "diff", str(run), str(run)],
        ["replay", str(incident)],
        ["replay", str(incident), "--json"],
    ]


def said(capfd: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int, str]:
    code = main(arguments)
    captured = capfd.readouterr()
    return code, captured.out + captured.err


def structure(report: str) -> list[str]:
    """The blocks of a text of Markdown, and what in them is more than text."""
    tokens = MarkdownIt("commonmark").enable("table").parse(report)
    blocks = [f"{token.type} {token.tag} {token.info}" for token in tokens]
    inline = [child for token in tokens for child in token.children or ()]
    harmless = {"text", "code_inline", "softbreak", "strong_open", "strong_close", "image"}
    return blocks + sorted({child.type for child in inline} - harmless)


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    run = hostile_run(tmp_path_factory.mktemp("fine") / "run", "name")
    assert main(["report", str(run)]) == 2
    return structure((run / "report.md").read_text())


@pytest.mark.parametrize(
    "name",
    ["everything", *(pytest.param(name, marks=pytest.mark.slow) for name in list(TEXTS)[1:])],
)
def test_no_text_steers_a_terminal_or_makes_structure(
    name: str, harmless: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = hostile_run(tmp_path / "run", TEXTS[name])
    for arguments in commands(run):
        code, text = said(capfd, arguments)
        assert code in (0, 1, 2, 64), arguments
        assert not STEERING.findall(text), (arguments, text)
        assert "unexpectedly" not in text, (arguments, text)
        assert "Traceback" not in text, arguments
    report = (run / "report.md").read_text()
    assert structure(report) == harmless
    assert "<script" not in report
    assert "<img" not in report
    drawn = (run / "norms.svg").read_text()
    assert "<script" not in drawn
    assert not STEERING.findall(report + drawn)


@pytest.mark.slow
def test_texts_without_end_are_shown_by_their_beginning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = hostile_run(tmp_path / "run", "<`[|" * 5_000)
    for arguments in commands(run):
        _, text = said(capfd, arguments)
        if "--json" not in arguments:
            assert len(text) < 1_000_000, arguments
        assert "unexpectedly" not in text, (arguments, text)
    assert (run / "report.md").stat().st_size < 1_000_000


OURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
"""Colours, and what draws a bar."""


def test_no_text_steers_a_real_terminal(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run", EVERYTHING.replace("\x1b[2J", "\x1b]0;t\x07"))
    lines = [command for command in commands(run) if "--json" not in command]
    code = f"from gradsight.cli import main\nfor line in {lines!r}: main(line)"
    shown = OURS.sub("", on_a_terminal(["-c", code]))
    assert "Evidence" not in shown
    assert shown.count("seen: ") >= 2
    assert not STEERING.findall(shown)


def on_a_terminal(command: list[str]) -> str:
    """What a warm Python process shows on a terminal of its own."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    process = warm.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    assert process.wait() == 0
    return b"".join(parts).decode("utf-8")


def snapshot(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Every file and folder: what is in it, its mode, when it was changed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        content = "folder"
        if stat.S_ISREG(facts.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(facts.st_mode):
            content = os.readlink(path)
        changed = 0 if content == "folder" else facts.st_mtime_ns
        found[str(path.relative_to(folder))] = (content, facts.st_mode, changed)
    return found


def test_looking_at_a_run_changes_nothing_but_the_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    work = tmp_path / "work"
    home.mkdir()
    work.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    monkeypatch.chdir(work)
    run = hostile_run(tmp_path / "run", "name")
    secret = home / ".profile"
    secret.write_text("secret")
    for name in ("report.md.partial", "norms.svg.partial", "report.html.partial", "report.md"):
        (run / name).symlink_to(secret)
    before = snapshot(tmp_path)
    for arguments in commands(run):
        said(capfd, arguments)
    after = snapshot(tmp_path)
    written = {"run/report.md", "run/report.html", "run/norms.svg"}
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    assert {name for name in changed if not name.startswith("home/.cache")} <= written
    assert {"run/report.md", "run/norms.svg"} <= changed
    assert secret.read_text() == "secret"
    assert not (run / "report.md").is_symlink()


def test_no_path_that_a_run_names_is_opened(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the reader's own words " * 3000)
    run = hostile_run(tmp_path / "run", str(secret))
    for arguments in commands(run):
        _, text = said(capfd, arguments)
        assert "own words" not in text
    assert "own words" not in (run / "report.md").read_text()
    _, text = said(capfd, ["influence", str(run)])
    assert "The samples' text is not shown: say where the data is, with --data PATH." in text
    code, text = said(capfd, ["influence", str(run), "--data", str(tmp_path / "nowhere")])
    assert (code, "there is no such file or folder" in text) == (64, True)
