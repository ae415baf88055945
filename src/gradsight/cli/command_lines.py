"""The command lines that `gradsight check` tells you to type next. No torch."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HEALTH = Path("health.toml")


@dataclass(frozen=True, slots=True)
class CheckCommand:
    """A call of `gradsight check`, to be written down with other options."""

    script: Sequence[str]
    """The script with its arguments, as given to `gradsight check`."""
    plain: Sequence[str]
    """The command that `gradsight check` runs for it."""
    options: Sequence[str] = ()
    """Options of `gradsight check` that decide how the script runs and what is checked."""
    health: Path | None = None
    has_preflight: bool = True

    def after_failure(self) -> list[str]:
        """How to run a script that failed without preflight, and without Gradsight."""
        plain = f"   {_typed(self.plain)}"
        goal = "To see whether Gradsight causes this failure, run the script"
        if not self.has_preflight:
            return [f"{goal} without Gradsight:", plain]
        command = self._with(preflight=False, health=self.health)
        return [f"{goal} without the pre-flight:", f"   {command}", "or without Gradsight:", plain]

    def to_silence(self, codes: Sequence[str]) -> list[str]:
        """How to run the script again without the first of these checks."""
        file = self.health or _HEALTH
        if file.exists() and not file.is_file():  # /dev/null takes no settings
            file = _HEALTH
        others = " (and likewise the others)" if len(codes) > 1 else ""
        return [
            f"To silence {codes[0]}{others}, put {codes[0]} = false at the top of {file} and run:",
            f"   {self._with(self.has_preflight, file)}",
        ]

    def _with(self, preflight: bool, health: Path | None) -> str:
        command = [*_gradsight(), "check", *self.options]
        if not preflight:
            command.append("--no-preflight")
        if health is not None:
            command += ["--health", str(health)]
        return shlex.join([*command, *self.script])


def _gradsight() -> list[str]:
    """Gradsight as you called it: python -m gradsight, or the program."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.parent.name == "gradsight":
        return [_named(sys.executable), "-m", "gradsight"]
    if called.stem == "gradsight" and shutil.which(called.name) is None:
        return [str(called)]
    return ["gradsight"]


def _typed(command: Sequence[str]) -> str:
    """A command as you type it: a program by its name, if your shell finds the same one."""
    program, *rest = command
    return shlex.join([_named(program), *rest])


def _named(program: str) -> str:
    """A program by its name if your shell finds it by that, else by its path."""
    name = "python" if program == sys.executable else os.path.basename(program)
    found = shutil.which(name)
    # The interpreters of several environments are links to one file: only their folders differ.
    if found is not None and Path(found).parent.resolve() == Path(program).parent.resolve():
        return name
    return program
