"""Prints the public contract of Gradsight as text. To accept a deliberate change, run

    python tests/contract/contract.py > tests/contract/contract.txt

and commit the file together with the change. The text is made from the public names, the real
commands and a few small runs; it does not depend on how the package is built inside.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TextIO

if __name__ == "__main__":  # pytest does this in conftest.py
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from contract import public_names, runs

HELP_WIDTH = "4000"
"""Columns of the help screens, so that every option is on one line."""


class Contract:
    """Reads the contract; `folder` receives the runs that it is read from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[tuple[str, ...], tuple[int, str]] = {}
        (folder / "build.py").write_text(runs.BUILD)
        (folder / "train.py").write_text(runs.SCRIPT)
        self.instances = runs.train_with_every_instrument(folder / "critical")
        runs.train(runs.Classifier(), folder / "healthy", health={"GS405": False})
        runs.train(runs.Classifier(unused=True), folder / "warning")
        self.files = sorted(
            path.relative_to(folder / "critical").as_posix()
            for path in (folder / "critical").rglob("*")
            if path.is_file()
        )
        shutil.copytree(folder / "critical", folder / "other")
        shutil.rmtree(folder / "other" / "gradient_dumper" / "step0")
        runs.damaged_copy(folder / "critical", folder / "damaged")
        dumper = runs.gradsight.GradientDumper(
            folder / "other", start_step=0, end_step=0, save_first_n=2
        )
        model = runs.Classifier()
        runs.loss_fn(model, runs.batches(3)[2]).backward()
        with dumper:
            dumper.dump(model, 0)

    # The command line.

    @cached_property
    def help(self) -> dict[tuple[str, ...], list[str]]:
        """Every command with the lines of its help screen."""
        return dict(self._all_help(()))

    def command(self, *arguments: str) -> tuple[int, str]:
        """Run a command once, in this process if possible; return its exit code and its output."""
        if arguments in self._done:
            return self._done[arguments]
        words = [word.format(here=self.folder) for word in arguments]
        with contextlib.chdir(self.folder), _captured() as output:
            if words[:2] == ["run", "train.py"]:  # it becomes the script
                code = subprocess.run([sys.executable, "-m", "gradsight", *words]).returncode
            else:
                code = entry_points(group="console_scripts")["gradsight"].load()(words)
            sys.stdout.flush()
            output.seek(0)
            self._done[arguments] = code, output.read()
        return self._done[arguments]

    def _all_help(self, command: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
        """Yield every command with the lines of its help screen."""
        _, text = self.command(*command, "--help")
        lines = text.splitlines()
        yield command, lines
        for name in (name for panel, name, _ in _rows(lines) if panel == "Commands"):
            if not name.startswith("-"):
                yield from self._all_help((*command, name))

    # The sections of the contract.

    def names(self) -> Iterator[str]:
        yield from public_names.lines()
        for name, instance in self.instances.items():
            hidden = public_names.NOT_PUBLIC.get(name, ())
            for attribute in sorted(vars(instance)):
                if not attribute.startswith("_") and attribute not in hidden:
                    yield f"attribute: {name}.{attribute}"

    def options(self) -> Iterator[str]:
        for lines in self.help.values():
            usage = next(line for line in lines if line.startswith("Usage:"))
            yield usage.removeprefix("Usage: ").strip()
            for panel, names, text in _rows(lines):
                if panel != "Commands" or names.startswith("-"):
                    facts = re.findall(r"\[(?:choices|default|required|env var)[^]]*\]", text)
                    yield "    " + " ".join([names, *facts])
                else:
                    yield f"    command {names}"

    def json_keys(self) -> Iterator[str]:
        with_json = {
            command
            for command, lines in self.help.items()
            if any("--json" in line for line in lines)
        }
        cases = {tuple(words) for _, words in JSON}
        missing = {c for c in with_json if not any(words[: len(c)] == c for words in cases)}
        assert not missing, f"JSON in contract.py has no case for {missing}"
        for title, words in JSON:
            code, text = self.command(*words)
            yield f"{title}, exit code {code}"
            yield from sorted(f"    {line}" for line in _keys("", json.loads(text)))

    def exit_codes(self) -> Iterator[str]:
        for command in self.help:
            code, _ = self.command(*command, "--no-such-option")
            yield f"{code:>3}  {' '.join(('gradsight', *command))}: unknown option"
        commands = {words[: len(command)] for words, _ in EXIT_CODES for command in self.help}
        missing = [command for command, lines in self.help.items() if command not in commands]
        assert not missing, f"EXIT_CODES in contract.py has no case for {missing}"
        for words, case in EXIT_CODES:
            code, _ = self.command(*words)
            yield f"{code:>3}  gradsight {' '.join(words)}: {case}".replace("{here}/", "")

    def run_directory(self) -> Iterator[str]:
        yield from self.files
        code, _ = self.command("report", "{here}/critical")
        assert code == 2
        yield "written by gradsight report:"
        for path in sorted((self.folder / "critical").rglob("*")):
            name = path.relative_to(self.folder / "critical").as_posix()
            if path.is_file() and name not in self.files:
                yield f"    {name}"
        yield "written by gradsight train:"
        code, _ = self.command(*TRAIN)
        assert code == 0
        root = next((self.folder / "Results").rglob("config.json")).parent
        for path in sorted(root.rglob("*")):
            if path.is_file():
                yield f"    {path.relative_to(root).as_posix()}"


TRAIN = (
    *("train", "--architecture", "char", "--model.n_layer", "1", "--model.n_head", "1"),
    *("--model.n_embd", "8", "--block_size", "16", "--max_steps", "2", "--data", "{here}/build.py"),
    *("--batch_size", "2", "--val_batch_size", "2", "--eval_samples", "2", "--device", "cpu"),
)
INCIDENT = f"{{here}}/critical/incidents/step{runs.NAN_STEP}-GS103"
JSON: list[tuple[str, tuple[str, ...]]] = [
    ("check: a script with a critical finding", ("check", "--json", "train.py", "diverges")),
    (
        "preflight: a build function with a finding",
        ("preflight", "--json", "build.py:probabilities"),
    ),
    ("report: a critical run", ("report", "{here}/critical", "--json")),
    ("findings: a critical run", ("findings", "{here}/critical", "--json")),
    ("influence: by sample", ("influence", "{here}/critical", "--json")),
    ("influence: by domain", ("influence", "{here}/critical", "--by", "domain", "--json")),
    ("compare: two runs that differ", ("compare", "{here}/critical", "{here}/warning", "--json")),
    ("replay: an incident", ("replay", INCIDENT, "--json")),
    ("replay: an incident, run again", ("replay", INCIDENT, "--build", "build.py:again", "--json")),
    ("verify: a damaged run", ("verify", "{here}/damaged", "--json")),
    (
        "memory predict: a build function",
        ("memory", "predict", "build.py:learns", "--memory", "2MB", "--json"),
    ),
]
EXIT_CODES: list[tuple[tuple[str, ...], str]] = [
    (("--version",), "version"),
    (("no-such-command",), "unknown command"),
    (("check", "train.py", "learns"), "healthy"),
    (("check", "train.py", "does not train"), "warning, because nothing was trained"),
    (
        ("check", "--fail-on", "critical", "train.py", "does not train"),
        "only critical findings count",
    ),
    (("check", "train.py", "fails"), "the script failed"),
    (("check", "missing.py"), "no such script"),
    (("run", "train.py", "exits with 7"), "the exit code of the script"),
    (("run", "missing.py"), "no such script"),
    (("preflight", "build.py:learns"), "healthy"),
    (("preflight", "build.py:probabilities"), "finding"),
    (("preflight", "build.py:fails"), "the build function failed"),
    (("preflight", "build.py:missing"), "no such function"),
    (("preflight", "train.py", "fails"), "the script failed"),
    *(
        ((command, f"{{here}}/{run}"), case)
        for command in ("report", "findings")
        for run, case in [
            ("healthy", "healthy"),
            ("warning", "warning"),
            ("critical", "critical"),
            ("damaged", "damaged"),
            ("missing", "no such run"),
        ]
    ),
    (("compare", "{here}/critical", "{here}/critical"), "equal"),
    (("compare", "{here}/critical", "{here}/healthy"), "different"),
    (("compare", "{here}/critical", "{here}/damaged"), "damaged"),
    (("compare", "{here}/critical", "{here}/missing"), "no such run"),
    (("influence", "{here}/critical"), "answered"),
    (("influence", "{here}/healthy"), "no scores"),
    (("influence", "{here}/damaged"), "damaged"),
    (("influence", "{here}/missing"), "no such run"),
    (("verify", "{here}/critical"), "intact"),
    (("verify", "{here}/damaged"), "damaged"),
    (("verify", "{here}/missing"), "no such run"),
    *(
        (("dump", command, f"{{here}}/{run}"), case)
        for command in ("list", "show", "verify")
        for run, case in [
            ("critical", "intact"),
            ("damaged", "damaged"),
            ("healthy", "no dumps"),
            ("missing", "no such run"),
        ]
    ),
    (("dump", "diff", "{here}/critical", "{here}/critical"), "equal"),
    (("dump", "diff", "{here}/critical", "{here}/other"), "different"),
    (("dump", "diff", "{here}/critical", "{here}/damaged"), "damaged"),
    (("dump", "diff", "{here}/critical", "{here}/missing"), "no such run"),
    (("replay", INCIDENT), "not run again"),
    (("replay", INCIDENT, "--build", "build.py:again"), "reproduced"),
    (("replay", INCIDENT.replace("critical", "damaged")), "damaged"),
    (("replay", "{here}/missing"), "no such incident"),
    (("explain",), "list of checks"),
    (("explain", "GS103"), "known code"),
    (("explain", "GS999"), "unknown code"),
    (("memory", "verify", "build.py:learns"), "passed"),
    (("memory", "verify", "build.py:counts_calls"), "failed"),
    (("memory", "verify", "build.py:fails"), "the build function failed"),
    (("memory", "predict", "build.py:learns"), "answered"),
    (("memory", "predict", "build.py:fails"), "the build function failed"),
    (("memory", "plan", "build.py:learns", "--budget", "1GB"), "answered"),
    (("memory", "plan", "build.py:learns", "--budget", "1kB"), "nothing fits"),
    (("train", "--data", "missing"), "no such data"),
    (("demo", "--run_dir", "{here}/critical"), "the folder holds a run"),
    (("serve", "{here}/missing"), "no such folder"),
]
"""Commands and cases; JSON has more of them. A finished `gradsight train` is in the list of files; `make demo` runs the demo."""


@contextlib.contextmanager
def _captured() -> Iterator[TextIO]:
    """Send standard output to a file and standard error to nowhere, also that of children."""
    sys.stdout.flush()
    sys.stderr.flush()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as output,
        open(os.devnull, "w", encoding="utf-8") as nowhere,
    ):
        saved = [os.dup(1), os.dup(2)]
        os.dup2(output.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(nowhere):
                yield output
        finally:
            for number, file in enumerate(saved, 1):
                os.dup2(file, number)
                os.close(file)


def _rows(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield panel, names and text of every row of a help screen."""
    panel = ""
    for line in lines:
        if line.startswith("╭"):
            panel = line.strip("╭─╮ ")
        elif line.startswith("│"):
            row = line.strip("│").strip().removeprefix("*").strip()
            names, *text = re.split(r" {2,}", row, maxsplit=1)
            # An option without help has its facts in the first column.
            names, *facts = re.split(r" (?=\[(?:default|required|choices))", names)
            yield panel, names, " ".join([*facts, *text])


def _keys(path: str, value: Any) -> set[str]:
    """Return every key with the type of its value, as lines of text."""
    if isinstance(value, dict):
        return set().union(
            *(_keys(f"{path}.{key}".lstrip("."), each) for key, each in value.items())
        )
    if isinstance(value, list):
        return set().union(*(_keys(f"{path}[]", each) for each in value)) or {f"{path}[]"}
    names = {str: "text", bool: "true or false", int: "integer", float: "float", type(None): "null"}
    return {f"{path}: {names[type(value)]}"}


SECTIONS: dict[str, Callable[[Contract], Iterator[str]]] = {
    "Public names": Contract.names,
    "Commands and options": Contract.options,
    "Keys of --json": Contract.json_keys,
    "Exit codes": Contract.exit_codes,
    "Files of a run directory": Contract.run_directory,
}


@contextlib.contextmanager
def plain_terminal() -> Iterator[None]:
    """Have help screens printed without colours and without line breaks."""
    saved = dict(os.environ)
    os.environ |= {"COLUMNS": HELP_WIDTH, "NO_COLOR": "1", "TERM": "dumb"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def section(contract: Contract, title: str) -> str:
    """Return one section as it is stored."""
    text = "\n".join(SECTIONS[title](contract))
    return f"# {title}\n{text}\n".replace(str(contract.folder), "FOLDER")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary, plain_terminal():
        contract = Contract(Path(temporary))
        text = "\n".join(section(contract, title) for title in sys.argv[1:] or SECTIONS)
    print(text, end="")
