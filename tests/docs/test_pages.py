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
TRAINERS = TREE / "docs" / "trainers.md"

NOTICES = {
    "accelerate": ["gradsight: continuing "],
    "findings": ["gradsight: step 12: GS103 "],
    "huggingface": ["gradsight: continuing ", "gradsight: step 2: GS103 "],
    "incidents": ["gradsight: step 12: GS103 "],
    "lightning": ["gradsight: continuing "],
    "memory": ["Predicting ", "Planning ", "Weighing "],
    "ranks": ["gradsight: continuing "],
    "trainers": ["gradsight: recording into runs/train"],
}
"""What Gradsight prints on standard error on purpose, by page: how such lines begin."""
OF_OTHERS = [
    "wandb: ",
    # Lightning's log and its warnings, which it prints as lines of its log.
    "GPU available: ",
    "TPU available: ",
    "💡 Tip: ",
    "`Trainer.fit` stopped: ",
    "Restoring states from the checkpoint ",
    "Restored all states from the checkpoint ",
    r"/.*/site-packages/lightning/pytorch/",
]
"""What other packages print on any page: regular expressions for how such lines begin."""
NOT_INSTALLED = {"torchtitan", "OLMo-core"}
"""They need other versions of some packages; examples/other_trainers/run.sh trains with them."""
SILENCED = {
    # Progress bars.
    "TQDM_DISABLE": "1",
    # No accelerator for pin_memory, which Hugging Face and Accelerate ask for by default.
    "PYTHONWARNINGS": "ignore::UserWarning:torch.utils.data.dataloader",
}


def page_id(page: Path) -> str:
    return page.stem


def run(script: str, file: Path) -> subprocess.CompletedProcess[str]:
    """Run a script from this file, in its folder."""
    file.write_text(script)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = {"PATH": path, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", **SILENCED}
    return subprocess.run(
        [sys.executable, file],
        cwd=file.parent,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )


def unexpected(page: Path, printed: str) -> list[str]:
    """The lines of standard error that nobody expects of this page."""
    notices = [re.escape(line) for line in NOTICES.get(page.stem, [])]
    known = re.compile("|".join([*notices, *OF_OTHERS]))
    return [line for line in printed.splitlines() if line.strip() and not known.match(line)]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_runs_as_written(page: Path, tmp_path: Path) -> None:
    """All blocks of a page are one script: also what happens when it ends counts."""
    done = run(pages.script(page), tmp_path / f"{page.stem}_page.py")
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert unexpected(page, done.stderr) == []


def test_the_first_example_of_the_ghost_page_is_a_script_by_itself(tmp_path: Path) -> None:
    """The whole page drops this engine early; here the engine lives until the interpreter ends."""
    given, first, *_ = pages.blocks(TREE / "docs" / "ghost.md")
    done = run(given.text + first.text, tmp_path / "first.py")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_traceback_at_exit_is_unexpected() -> None:
    printed = "wandb: synced\nException ignored in: <function ScoreFolder.__del__>\n"
    assert unexpected(README, printed) == ["Exception ignored in: <function ScoreFolder.__del__>"]


# Trainers.


def test_every_line_of_the_table_of_trainers_is_run() -> None:
    table = TRAINERS.read_text().split("| --- | --- | --- |\n")[1].split("\n\n")[0]
    for row in table.splitlines():
        trainer, lines, linked = row.strip("| ").split(" | ")
        if trainer in NOT_INSTALLED:
            continue
        others = [TRAINERS.parent / name for name in re.findall(r"\((\w+\.md)", linked)]
        code = "".join(map(pages.script, [TRAINERS, *others]))
        for line in re.findall(r"`([^`]+)`", lines):
            assert line in code, f"{trainer}: {line}"


def test_every_section_of_the_trainers_is_a_script_by_itself(tmp_path: Path) -> None:
    for number, text in enumerate(TRAINERS.read_text().split("\n## ")):
        section = tmp_path / f"section_{number}.md"
        section.write_text(text)
        section.with_suffix(".py").write_text(pages.script(section))
    undefined_names = ["ruff", "check", "--isolated", "--select", "F821", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", *undefined_names], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# Links and statements.


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert targets
    for target in targets:
        assert (page.parent / target).exists(), target


def test_the_readme_leads_to_every_page() -> None:
    """Directly, or by way of an index: docs/index.md."""
    linked = set(re.findall(r"\]\(docs/(\w+\.md)\)", README.read_text()))
    if "index.md" in linked:
        linked |= set(re.findall(r"\]\((\w+\.md)\)", (TREE / "docs/index.md").read_text()))
    assert {page.name for page in PAGES[1:]} == linked


@pytest.mark.parametrize(
    "limit",
    [
        "Windows is untested; without `run_dir` it",
        "tested on the CPU and on a simulated accelerator, never on a GPU",
    ],
)
def test_pages_state_the_same_limits(limit: str) -> None:
    stating = {page.stem for page in PAGES if limit in page.read_text()}
    assert {"README", "costs"} <= stating


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
    done = run(pages.script(page), tmp_path / "page.py")
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
