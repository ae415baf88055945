"""The gradsight command. One command per file; a command's file is loaded when it is called, so help answers without torch."""

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from gradsight.errors import GradsightError, UsageError

WRONG_USAGE = 64

app = App(
    name="gradsight",
    help="What the gradients of a PyTorch training run are doing, which samples push the model where, and what backward costs.",
    result_action="return_value",
    name_transform=lambda name: name,
)
app.command("gradsight.cli.check:check", name="check")
app.command("gradsight.cli.demo:demo", name="demo")
app.command("gradsight.cli.report:report", name="report")


def main(tokens: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; whatever goes wrong is one clear message, never a traceback of ours."""
    try:
        code = app(_prepared(sys.argv[1:] if tokens is None else tokens), exit_on_error=False)
    except (CycloptsError, UsageError) as error:
        if isinstance(error, UsageError):
            print(f"gradsight: {error}", file=sys.stderr)
        return WRONG_USAGE
    except GradsightError as error:
        print(f"gradsight: {error}", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0


def _prepared(tokens: Sequence[str]) -> Sequence[str]:
    """The command line, with the arguments of a checked script set apart from ours."""
    if not tokens or tokens[0] != "check":
        return tokens
    from gradsight.cli.check import split_tokens

    return split_tokens(tokens)
