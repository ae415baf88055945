"""A unified diff that mends a script, where a machine can: clipping, and clearing gradients."""

import ast
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsight.errors import UsageError
from gradsight.values.findings import Finding

_CLIP = {"GS101", "GS102", "GS201", "GS202"}
_CLEAR = {"GS305"}


def proposed_patch(
    script: Path, findings: Sequence[Finding], optimizers: Sequence[dict[str, Any]]
) -> str:
    """The diff, empty where there is nothing that a machine should mend.

    `optimizers` say where each of them steps.
    """
    try:
        before = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{script} cannot be read, so there is nothing to patch: {error}"
        ) from error
    codes = {finding.code for finding in findings}
    if not _imports_torch(before):
        codes -= _CLIP
    places = [optimizer["steps"] for optimizer in optimizers if optimizer.get("steps")]
    steps = {line for file, line in places if Path(file).resolve() == script.resolve()}
    calls = [call for call in _step_calls(before) if call.lineno in steps]
    old = before.splitlines(keepends=True)
    new = list(old)
    # From the last to the first: what is put in must not move the lines of the others.
    for call in sorted(calls, key=lambda call: call.lineno, reverse=True):
        _mend(new, call, codes)
    return "".join(difflib.unified_diff(old, new, f"a/{script.name}", f"b/{script.name}"))


def _mend(lines: list[str], call: ast.Expr, codes: set[str]) -> None:
    """Put what is needed before and after one `optimizer.step()`."""
    assert isinstance(call.value, ast.Call)
    assert isinstance(call.value.func, ast.Attribute)
    optimizer = ast.unparse(call.value.func.value)
    indent = lines[call.lineno - 1][: call.col_offset]
    end = call.end_lineno or call.lineno
    if not lines[end - 1].endswith("\n"):
        lines[end - 1] += "\n"
    if codes & _CLEAR:
        lines.insert(end, f"{indent}{optimizer}.zero_grad()\n")
    if codes & _CLIP:
        # The optimizer is the one name that is sure to be known at this line.
        held = f'[parameter for group in {optimizer}.param_groups for parameter in group["params"]]'
        lines.insert(
            call.lineno - 1, f"{indent}torch.nn.utils.clip_grad_norm_({held}, max_norm=1.0)\n"
        )


def _step_calls(source: str) -> list[ast.Expr]:
    """The statements that are a call of some `x.step(...)` and stand alone on their lines."""
    return [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "step"
    ]


def _imports_torch(source: str) -> bool:
    """Whether the name `torch` is there to be used."""
    return any(
        alias.name.split(".")[0] == "torch" and alias.asname is None
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import)
        for alias in node.names
    )
