"""The README and the pages under docs: every block runs as written, every link leads somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import pages

TREE = Path(__file__).parents[2]
README = TREE / "README.md"
PAGES = [README, *sorted((TREE / "docs").glob("*.md"))]


def page_id(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_runs_as_written(page: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, pages.__file__, page],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert targets
    for target in targets:
        assert (page.parent / target).exists(), target


def test_the_readme_is_short() -> None:
    counted = subprocess.run(["wc", "-w", README], capture_output=True, text=True, check=True)
    assert int(counted.stdout.split()[0]) <= 900


def test_the_readme_leads_to_every_page() -> None:
    linked = re.findall(r"\]\(docs/(\w+\.md)\)", README.read_text())
    assert {page.name for page in PAGES[1:]} == set(linked)


def test_the_commands_of_the_readme_are_what_make_test_runs() -> None:
    """They cannot run here: this is one of them, and it runs the other."""
    (block,) = [block for block in pages.blocks(README) if pages.is_make(block)]
    targets = {line.split()[1] for line in block.text.splitlines()}
    rules = re.findall(r"^(\w+): (.*)$", (TREE / "Makefile").read_text(), re.MULTILINE)
    prerequisites = dict(rules)["test"].split()
    assert targets == {"test", "demo"}
    assert "demo" in prerequisites


def test_a_block_that_fails_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    done = subprocess.run(
        [sys.executable, pages.__file__, page], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "line 6" in done.stderr


@pytest.mark.parametrize(
    "text", ["```\nls\n```\n", "```yaml\na: 1\n```\n", "text\n\n    ls\n", "```sh\nls\n"]
)
def test_a_block_that_nothing_would_run_is_refused(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md"):
        pages.blocks(page)
