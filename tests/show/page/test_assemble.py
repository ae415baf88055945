"""One file out of many: the policy's hashes, the modules' names, what none of them may do."""

import base64
import hashlib
import re
import subprocess
from pathlib import Path

import gradsight.show.page
from gradsight.show.page.assemble import MODULES, page
from gradsight.show.page.payload import nothing_payload

FOLDER = Path(gradsight.show.page.__file__).parent
STATIC = FOLDER / "static"
VENDOR = FOLDER / "vendor"


def hash_of(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def empty_page() -> str:
    return page(nothing_payload(Path("runs/first"), "no optimizer step was seen"))


def test_the_policy_allows_what_is_in_the_page_and_nothing_else() -> None:
    text = empty_page()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert "unsafe" not in policy
    assert "connect-src" not in rules
    scripts = re.findall(r'<script(?: type="module")?>(.*?)</script>', text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert rules["script-src"].split() == [f"'sha256-{hash_of(each)}'" for each in scripts]
    assert rules["style-src"] == f"'sha256-{hash_of(style)}'"
    assert text.index("Content-Security-Policy") < text.index("<script>")


def test_every_module_is_in_the_page_after_those_it_needs() -> None:
    assert {path.name for path in STATIC.glob("*.js")} == {*MODULES, "theme-first.js"}
    for place, name in enumerate(MODULES):
        needed = re.findall(r'from "\./([\w.-]+)"', (STATIC / name).read_text())
        assert set(needed) <= set(MODULES[:place]), name


def test_what_a_module_imports_is_exported() -> None:
    exported = {
        name: set(re.findall(r"^export (?:async )?(?:function|const|class|let) (\w+)", text, re.M))
        for name, text in ((each, (STATIC / each).read_text()) for each in MODULES)
    }
    for name in MODULES:
        text = (STATIC / name).read_text()
        for names, source in re.findall(r'import \{([^}]*)\} from "\./([\w.-]+)"', text):
            for each in names.split(","):
                assert each.strip() in exported[source], (name, each)
                assert len(re.findall(rf"\b{each.strip()}\b", text)) > 1, (
                    f"{name}: {each} is unused"
                )


def test_no_name_is_used_twice() -> None:
    """All modules share one scope in the file."""
    found: dict[str, str] = {}
    declared = re.compile(r"^(?:export )?(?:async )?(?:function|class) (\w+)", re.MULTILINE)
    constants = re.compile(r"^(?:export )?(?:const|let) (.*?);", re.MULTILINE | re.DOTALL)
    for module in MODULES:
        text = (STATIC / module).read_text()
        names = declared.findall(text)
        for line in constants.findall(text):
            names += re.findall(r"(?:^|,\s)(\w+) = ", line)
        for name in names:
            assert name not in found, f"{name}: in {found.get(name)} and in {module}"
            found[name] = module
    assert len(found) > 50


def test_no_markup_is_made_of_text() -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    for name in MODULES:
        assert not re.search(forbidden, (STATIC / name).read_text()), name
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|https?://", html)
    assert not re.search(r"url\(|@import", (STATIC / "page.css").read_text())


def test_uplot_is_what_was_released() -> None:
    sums = [line.split() for line in (VENDOR / "uPlot.sha256").read_text().splitlines()]
    assert {name for _, name in sums} == {"uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE"}
    for expected, name in sums:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == expected, name
    assert "MIT" in (VENDOR / "uPlot.LICENSE").read_text()


def test_nothing_that_is_embedded_ends_its_element() -> None:
    payload = nothing_payload(Path("runs/first"), "</script><script>alert(1)</script>")
    text = page(payload)
    assert text.count("</script>") == 3
    assert "alert(1)</script>" not in text


def test_git_tracks_what_the_page_is_made_of() -> None:
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "src/gradsight/show/page",
        ],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in (*MODULES, "index.html", "page.css", "theme-first.js"):
        assert f"static/{name}" in listed
