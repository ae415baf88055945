"""A unified diff that mends a script, where a machine can: clipping, and clearing gradients.

What is put in goes by the syntax tree, and is parsed again before it is offered: a script that
cannot be mended surely is left alone, and it is said why.
"""

import ast
import difflib
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from gradsight.attach.step_calls import StepCall, span_of
from gradsight.values.findings import Finding

_CLIP = {"GS101", "GS102", "GS201", "GS202"}
_CLEAR = {"GS305"}
_BOM = "\ufeff"


@dataclass(frozen=True, slots=True)
class Patch:
    """A diff in the script's own encoding, empty where nothing is mended, and why it is so."""

    diff: bytes
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Mending:
    """Statements to put around one that is there."""

    statement: ast.stmt
    before: tuple[str, ...]
    after: tuple[str, ...]


class _Refused(Exception):
    """This place cannot be mended by a machine; the words say why."""


def proposed_patch(
    script: Path, before: bytes, findings: Sequence[Finding], optimizers: Sequence[dict[str, Any]]
) -> Patch:
    """The diff that mends a script of these bytes.

    `optimizers` say where each of them steps.
    """
    codes = {finding.code for finding in findings}
    if not codes & (_CLIP | _CLEAR):
        return Patch(b"", ("nothing was found that a machine can mend",))
    if _bytes_of(script) != before:
        return Patch(b"", (f"{script.name} was changed while it ran",))
    source = _Source(before)
    notes: list[str] = []
    mendings: dict[int, _Mending] = {}
    for call in _step_calls(optimizers):
        try:
            mending = _mending(source.tree, call, codes, script)
        except _Refused as refused:
            notes.append(f"{Path(call.file).name}:{call.line} is left as it is: {refused}")
        else:
            mendings[id(mending.statement)] = mending
    after = source.mended(list(mendings.values()))
    if not _is_as_meant(source, after, list(mendings.values())):
        return Patch(b"", (f"the mended {script.name} does not read as it should",))
    return Patch(source.diff(after, script.name), tuple(dict.fromkeys(notes)))


def _bytes_of(script: Path) -> bytes | None:
    try:
        return script.read_bytes()
    except OSError:
        return None


def _step_calls(optimizers: Sequence[dict[str, Any]]) -> Iterator[StepCall]:
    """Every place where an optimizer stepped, once."""
    known: set[tuple[Any, ...]] = set()
    for optimizer in optimizers:
        for told in optimizer.get("step_calls", ()):
            call = StepCall(**told)
            key = (call.file, call.line, call.text)
            if key not in known:
                known.add(key)
                yield call


def _mending(tree: ast.Module, call: StepCall, codes: set[str], script: Path) -> _Mending:
    """What one step of an optimizer lacks."""
    if Path(call.file).resolve() != script.resolve():
        raise _Refused(f"it is not a line of {script.name}")
    node = _node(tree, call)
    if node is None or call.optimizer is None:
        written = f" in `{call.text}`" if call.text else ""
        raise _Refused(f"no name for the optimizer that steps{written} is known there")
    statement = _statement_of(tree, node)
    # A closure computes the gradient inside of the step, several times perhaps.
    if len(node.args) + len(node.keywords) > (call.scaler is not None):
        raise _Refused(f"`{call.text}` computes its gradient itself; mend the closure by hand")
    before: list[str] = []
    after: list[str] = []
    if codes & _CLIP:
        before = _clipping(tree, call)
    if codes & _CLEAR:
        if isinstance(statement, ast.Return):
            raise _Refused("nothing can follow a return")
        after = [f"{call.optimizer}.zero_grad()"]
    return _Mending(statement, tuple(before), tuple(after))


def _node(tree: ast.Module, call: StepCall) -> ast.Call | None:
    """The call in the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and call.span and span_of(node) == tuple(call.span):
            return node
    return None


def _statement_of(tree: ast.Module, call: ast.Call) -> ast.stmt:
    """The statement that is this call and nothing else, its result apart."""
    for node in ast.walk(tree):
        whole = (ast.Expr, ast.Assign, ast.AnnAssign, ast.Return)
        if isinstance(node, whole) and node.value is call:
            return node
    raise _Refused(f"`{ast.unparse(call)}` is part of a larger expression")


def _clipping(tree: ast.Module, call: StepCall) -> list[str]:
    """The statements that clip what one call is about to step on."""
    names = {getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(tree)}
    if names & {"clip_grad_norm_", "clip_grad_value_"}:
        raise _Refused("the script clips gradients already")
    if call.wrapper is not None:
        # It may leave steps out (accumulation), and partial gradients must not be clipped.
        raise _Refused(f"its {call.wrapper} decides when gradients are whole; clip as it documents")
    if call.torch is None:
        raise _Refused("torch has no name there")
    # The optimizer is the one name that is sure to be known at this line.
    held = "[parameter for group in {}.param_groups for parameter in group['params']]"
    clip = f"{call.torch}.nn.utils.clip_grad_norm_({held.format(call.optimizer)}, max_norm=1.0)"
    if call.scaler is None:
        return [clip]
    if "unscale_" in names:
        raise _Refused("the script unscales gradients itself; clip after it does")
    return [f"{call.scaler}.unscale_({call.optimizer})", clip]


class _Source:
    """The text of a script, and where the syntax tree's lines and columns are in it."""

    def __init__(self, content: bytes) -> None:
        encoding, _ = tokenize.detect_encoding(BytesIO(content).readline)
        self.encoding = encoding.removesuffix("-sig")
        text = content.decode(self.encoding)
        self._bom = _BOM if text.startswith(_BOM) else ""
        self.text = text.removeprefix(_BOM)
        self.tree = ast.parse(content)
        # Python's lines, which are neither those of str.splitlines (a form feed ends none), nor
        # those of a diff (a single carriage return ends one).
        self._lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", self.text)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def mended(self, mendings: Sequence[_Mending]) -> str:
        """The text with everything put in."""
        text = self.text
        # From the last to the first: what is put in must not move the places of the others.
        for mending in sorted(mendings, key=_place_of, reverse=True):
            text = self._put_in(text, mending)
        return text

    def _put_in(self, text: str, mending: _Mending) -> str:
        """The text with one mending, on lines of its own where the statement has those."""
        first, column, last, end_column = span_of(mending.statement)
        start = self._offset(first, column)
        end = self._offset(last, end_column)
        line = self._starts[first - 1]
        line_end = self._starts[last]
        indent = text[line:start]
        rest = text[end:line_end]
        continued = first > 1 and self._lines[first - 2].rstrip("\r\n").endswith("\\")
        alone = not indent.strip() and re.fullmatch(r"[ \t\f]*(#[^\r\n]*)?[\r\n]*", rest)
        if not alone or continued:
            before = "".join(f"{code}; " for code in mending.before)
            after = "".join(f"; {code}" for code in mending.after)
            return text[:start] + before + text[start:end] + after + text[end:]
        newline = self._newline()
        before = "".join(f"{indent}{code}{newline}" for code in mending.before)
        whole = text[line:line_end]
        after = "".join(f"{indent}{code}{newline}" for code in mending.after)
        if after and not whole.endswith(("\r", "\n")):
            after = newline + after.removesuffix(newline)
        return text[:line] + before + whole + after + text[line_end:]

    def _offset(self, line: int, column: int) -> int:
        """The place of the tree's line and column, which counts bytes of UTF-8."""
        written = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(written)

    def _newline(self) -> str:
        found = re.search(r"\r\n|\r|\n", self.text)
        return found[0] if found else "\n"

    def diff(self, after: str, name: str) -> bytes:
        """The unified diff to a changed text, in the encoding of the file."""
        old = _diff_lines(self._bom + self.text)
        new = _diff_lines(self._bom + after)
        lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
        text = "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in lines
        )
        return text.encode(self.encoding)


def _place_of(mending: _Mending) -> tuple[int, int]:
    return mending.statement.lineno, mending.statement.col_offset


def _diff_lines(text: str) -> list[str]:
    """Lines as diff and patch know them: a line feed ends each."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _is_as_meant(source: _Source, after: str, mendings: Sequence[_Mending]) -> bool:
    """Whether the new text is the old program with those statements more, and compiles."""
    for mending in mendings:
        for suite in _suites(source.tree):
            if mending.statement in suite:
                place = suite.index(mending.statement)
                suite[place + 1 : place + 1] = ast.parse("\n".join(mending.after)).body
                suite[place:place] = ast.parse("\n".join(mending.before)).body
    try:
        compile(after, "mended", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return ast.dump(ast.parse(after)) == ast.dump(source.tree)


def _suites(tree: ast.Module) -> Iterator[list[Any]]:
    """Every list of statements."""
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value
