"""The gradsight command: one command per file, loaded when it is called.

So `gradsight --help` answers without torch.
"""

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from gradsight.errors import WRONG_USAGE, GradsightError, RunError
from gradsight.show.encoding import never_fail_to_encode
from gradsight.values.texts import for_terminal

NOBODY_READS = 128 + 13
"""As a shell tells of a process that SIGPIPE ended."""

_HELP = (
    "What the gradients of a PyTorch training run are doing, which samples push the model where, "
    "and what backward costs."
)
_COMMANDS = {
    "check": ("check:check", "Run an unmodified training script and judge its gradients."),
    "compare": ("compare:compare", "Where two runs differ: first step, parameter, settings."),
    "demo": (
        "demo:demo",
        "One minute, no arguments: train a small GPT under Gradsight and write a report.",
    ),
    "dump": ("dump:app", "The gradients on disk: list, show, verify, diff."),
    "explain": (
        "explain:explain",
        "What a check looks for, why it matters, and how to fix the fault.",
    ),
    "findings": (
        "findings:findings",
        "Print what was found in a run so far, for scripts that poll.",
    ),
    "influence": (
        "influence:influence",
        "Which samples and domains helped or hurt; --export a list or weights.",
    ),
    "memory": ("memory:app", "Activation checkpointing: verify, predict, plan."),
    "preflight": (
        "preflight:preflight",
        "Judge what the first step of a script, or one batch, decides.",
    ),
    "replay": (
        "replay:replay",
        "Run a recorded incident again: first bad operation, guilty samples.",
    ),
    "report": ("report:report", "Write the report of a run and print its verdict."),
    "run": ("run:run", "Run an unmodified training script and record its gradients."),
    "serve": ("serve:serve", "Show a run, or a folder of runs, live in the browser."),
    "train": ("train:app", "Train a GPT-2 with every instrument at work."),
    "verify": ("verify:verify", "Compare every file of a run with its checksums."),
}
"""Where each command lives, and its line in the list of commands, which loads none of them."""


_READING = ("compare", "dump", "findings", "influence", "replay", "report", "verify")
"""Commands that look at what a stranger may have sent."""


def main(tokens: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Whatever goes wrong is one clear message, never a traceback of ours.
    """
    if tokens is None:
        tokens = sys.argv[1:]
    never_fail_to_encode(sys.stdout, sys.stderr)
    listing = not tokens or tokens[0].startswith("-")
    try:
        code = all_commands(listing)(_prepared(tokens), exit_on_error=False)
        # Here a pipe that nobody reads any more can be answered; at Python's end it is a traceback.
        sys.stdout.flush()
    except CycloptsError:  # it has printed its own message
        return WRONG_USAGE
    except GradsightError as error:
        all_ranks_find_the_same = error.exit_code == WRONG_USAGE
        if not all_ranks_find_the_same or os.environ.get("RANK", "0") == "0":
            print(for_terminal(f"gradsight: {error}"), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output (head, less) has seen enough: nothing may be written to it any
        # more, not even what Python flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    except OSError as error:
        if error.filename is None:
            raise
        print(for_terminal(f"gradsight: {error.filename}: {error.strerror}"), file=sys.stderr)
        return WRONG_USAGE
    except Exception as error:
        if not tokens or tokens[0] not in _READING:
            raise
        # The readers say what is wrong with a file; this is for what none of them foresaw.
        what = f"{type(error).__name__}: {error}"
        print(for_terminal(f"gradsight: unexpectedly, it cannot be read: {what}"), file=sys.stderr)
        return RunError.exit_code
    return code if isinstance(code, int) else 0


def all_commands(listing: bool = False) -> App:
    """The commands; their lines stand in the list of all only, or they would hide their help."""
    # Left to itself, cyclopts ends the process with a command's result, and makes dashes of the
    # underscores in options.
    app = App(
        name="gradsight",
        help=_HELP,
        version=_versions,
        result_action="return_value",
        name_transform=lambda name: name,
    )
    for name, (place, line) in _COMMANDS.items():
        options = {"help": line} if listing else {}
        app.command(f"gradsight.cli.{place}", name=name, **options)
    app.register_install_completion_command(
        help="Let bash, zsh or fish complete commands and options.", group="Shell"
    )
    return app


def _versions() -> str:
    """What a report of a fault should say: ours, torch's (which is not loaded for it), Python's."""
    import platform
    from importlib import metadata

    from gradsight.core.torch_names import TESTED

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    ours = metadata.version("gradsight")
    python = platform.python_version()
    return f"gradsight {ours}, torch {torch} (tested with {TESTED}), Python {python}"


def _prepared(tokens: Sequence[str]) -> Sequence[str]:
    """The command line, where the parser would misread what users may write."""
    if tokens and tokens[0] in ("check", "preflight", "run"):
        from gradsight.cli.check import split_tokens

        return split_tokens(tokens)
    if tokens and tokens[0] == "train":
        from gradsight.cli.train import with_joined_switches

        return with_joined_switches(tokens)
    return tokens
