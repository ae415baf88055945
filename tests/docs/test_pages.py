"""The README and the pages under docs: every block runs as written, every link leads somewhere."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

import warm
from docs import pages
from docs.warm_commands import COMMANDS, warm_commands

TREE = Path(__file__).parents[2]
README = TREE / "README.md"
PAGES = [README, *sorted((TREE / "docs").glob("*.md"))]
TRAINERS = TREE / "docs" / "trainers.md"

NOTICES = {
    "README": ["gradsight: step 60: GS103 "],
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
    # Hugging Face and Accelerate ask for pinned memory by default; there is no accelerator.
    r"/.*/torch/utils/data/dataloader.py:\d+: UserWarning: 'pin_memory' argument is set",
    r"  super\(\).__init__\(loader\)$",
    r"  warnings.warn\(warn_msg\)$",
]
"""What other packages print on any page: regular expressions for how such lines begin."""
OUTPUT_VARIES = {"serve"}
"""Pages whose shown output has a port, a token and five digits of a norm."""
SHOW_PROGRESS_BARS = {"huggingface", "trainers"}
"""Pages that need a new interpreter: tqdm reads TQDM_DISABLE when it is imported."""
NOT_INSTALLED = {"torchtitan", "OLMo-core"}
"""They need other versions of some packages; examples/other_trainers/run.sh trains with them."""


def page_id(page: Path) -> str:
    return page.stem


def environment(*folders_of_commands: Path) -> dict[str, str]:
    path = os.pathsep.join(
        map(str, [*folders_of_commands, Path(sys.executable).parent, os.environ["PATH"]])
    )
    settings = {"COLUMNS": "80", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    return {**os.environ, "PATH": path, "WANDB_MODE": "offline", **settings}


def run(
    script: str, file: Path, warm_in_shell: Iterable[str] = COMMANDS, new_interpreter: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a script from this file, in its folder, and its shell blocks with warm commands."""
    file.write_text(script)
    with warm_commands(file.parent / "commands", warm_in_shell) as commands:
        options = {"cwd": file.parent, "env": environment(commands), "text": True}
        if new_interpreter:
            return subprocess.run([sys.executable, file], capture_output=True, **options)
        return warm.run([file], capture_output=True, **options)


def unexpected(page: Path, printed: str) -> list[str]:
    """Return the lines of standard error that this page should not print."""
    notices = [re.escape(line) for line in NOTICES.get(page.stem, [])]
    known = re.compile("|".join([*notices, *OF_OTHERS]))
    return [line for line in printed.splitlines() if line.strip() and not known.match(line)]


@pytest.mark.parametrize(
    "page",
    [README, *(pytest.param(page, marks=pytest.mark.slow) for page in PAGES[1:])],
    ids=page_id,
)
def test_every_block_runs_as_written_and_prints_what_is_shown(page: Path, tmp_path: Path) -> None:
    """The README's shell lines call the installed `gradsight`; other pages start it warm."""
    commands = ["python"] if page == README else COMMANDS
    file = tmp_path / f"{page.stem}_page.py"
    done = run(pages.script(page), file, commands, page.stem in SHOW_PROGRESS_BARS)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert unexpected(page, done.stderr) == []
    if page.stem not in OUTPUT_VARIES:
        for command, shown in pages.shown_outputs(page):
            printed = (tmp_path / command.output_file).read_text()
            assert pages.is_shown(shown, printed), f"shown:\n{shown}\nprinted:\n{printed}"


@pytest.mark.slow
def test_the_first_example_of_the_ghost_page_is_a_script_by_itself(tmp_path: Path) -> None:
    """The engine lives until the interpreter ends, so the interpreter has to be a new one."""
    given, first, *_ = pages.blocks(TREE / "docs" / "ghost.md")
    (tmp_path / "first.py").write_text(given.text + first.text)
    done = subprocess.run(
        [sys.executable, "first.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
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
    assert undefined_names(tmp_path) == ""


def test_no_page_uses_an_undefined_name(tmp_path: Path) -> None:
    for page in PAGES:
        (tmp_path / f"{page.stem}.py").write_text(pages.script(page))
    assert undefined_names(tmp_path) == ""


def undefined_names(folder: Path) -> str:
    """Return what ruff prints about names that no line of a script defines."""
    check = ["ruff", "check", "--isolated", "--quiet", "--select", "F821,E9", str(folder)]
    return subprocess.run([sys.executable, "-m", *check], capture_output=True, text=True).stdout


# Links and statements.


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text())
    assert targets
    for file, section in targets:
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not section or section in sections(target), f"{file}#{section}"


def sections(page: Path) -> list[str]:
    """Return the names by which links reach the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_readme_leads_to_every_page() -> None:
    """Directly, or by way of an index: docs/index.md."""
    linked = set(re.findall(r"\]\(docs/(\w+\.md)\)", README.read_text()))
    if "index.md" in linked:
        linked |= set(re.findall(r"\]\((\w+\.md)\)", (TREE / "docs/index.md").read_text()))
    assert {page.name for page in PAGES[1:]} == linked


@pytest.mark.parametrize(
    "limit",
    [
        "Windows is untested, and `run_dir` [raises an error]",
        "tested on the CPU and on a [device that is simulated in Python]",
    ],
)
def test_pages_state_the_same_limits(limit: str) -> None:
    stating = {page.stem for page in PAGES if limit in page.read_text()}
    assert {"README", "costs"} <= stating


def test_the_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    """They cannot run here: `make test` runs this test."""
    lines = [
        line for block in pages.blocks(README) if block.is_setup for line in block.text.splitlines()
    ]
    targets = {line.split()[1] for line in lines if line.startswith("make ")}
    rules = dict(re.findall(r"^([\w-]+):(.*)$", (TREE / "Makefile").read_text(), re.MULTILINE))
    assert targets == {"demo", "test", "test-slow"}
    assert targets <= set(rules)
    assert "demo" in rules["test"].split()


def test_the_readme_names_the_versions_and_extras_of_the_package() -> None:
    text = README.read_text()
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + re.findall(r"Python ([\d.]+) or newer", text)[0]
    assert "torch>=" + re.findall(r"torch ([\d.]+) or newer", text)[0] in project["dependencies"]
    tested_with = re.findall(r"tested with ([\d.]+)\)", text)[0]
    assert f"torch=={tested_with}." in (TREE / "constraints.txt").read_text()
    (sentence,) = re.findall(r"The extras are (.*)\.$", text, re.MULTILINE)
    extras = set(project["optional-dependencies"]) - {"dev"}
    assert set(re.findall(r"`(\w+)`", sentence)) == extras
    installed = re.findall(r"pip install '\.\[(\w+)\]'", text)
    assert installed
    assert set(installed) <= extras


# This folder's own tools.


def test_a_block_that_fails_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    done = run(pages.script(page), tmp_path / "page.py")
    assert done.returncode == 1
    assert "line 6" in done.stderr


@pytest.mark.parametrize(
    ("promised", "code"), [("", 1), ("  # exits with 2: why", 0), ("  # exits with 0", 1)]
)
def test_an_exit_code_is_the_promised_one(promised: str, code: int, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```sh\npython -c 'exit(2)'{promised}\n```\n")
    assert run(pages.script(page), tmp_path / "page.py").returncode == code


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        ("one\ntwo\nthree\nfour\n", True),
        ("\none  \nfour\n", True),
        ("one\nfour\nfive\n", False),
        ("zero\none\nfour\n", False),
        ("one\ntwo\n", False),
    ],
)
def test_shown_output_is_compared_line_by_line(printed: str, same: bool) -> None:
    assert pages.is_shown("one\n...\nfour\n", printed) == same


def test_a_warm_command_is_ended_by_its_shell(tmp_path: Path) -> None:
    """`kill %1` has to reach the process itself, which `wait` would otherwise outlive."""
    page = tmp_path / "page.md"
    wait = 'import os, time; open("pid", "w").write(str(os.getpid())); print(1, flush=True); time.sleep(60)'
    page.write_text(
        f"```sh\npython -c '{wait}' > started.txt &\n"
        "until [ -s started.txt ]; do sleep 0.05; done\n"
        "kill %1\n"
        "while kill -0 $(cat pid) 2> /dev/null; do sleep 0.05; done\n```\n"
    )
    done = run(pages.script(page), tmp_path / "page.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text", ["```\nls\n```\n", "```yaml\na: 1\n```\n", "text\n\n    ls\n", "```sh\nls\n"]
)
def test_a_block_that_nothing_would_run_is_refused(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md"):
        pages.blocks(page)
