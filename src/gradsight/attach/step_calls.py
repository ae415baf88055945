"""Where in a script an optimizer steps, to the column: what a patch must know to be right."""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradsight.core.source import users_frames


@dataclass(frozen=True, slots=True)
class StepCall:
    """One call in the user's source in which an optimizer stepped."""

    file: str
    line: int
    span: tuple[int, int, int, int] | None
    """First line, column, last line, column, as the syntax tree counts; None if it is unknown."""
    text: str
    """The call as it is written."""
    optimizer: str | None = None
    """How the script names the optimizer there; None where no plain name can be had."""
    wrapper: str | None = None
    """The type of what is stepped, where that is not the optimizer itself."""
    scaler: str | None = None
    """How the script names the GradScaler that steps the optimizer."""
    torch: str | None = None
    """How the script names torch there."""


def step_call(frame: FrameType, optimizer: Any) -> StepCall:
    """The call that this frame of the user's is at, while the optimizer steps in it."""
    file = frame.f_code.co_filename
    line = frame.f_lineno
    call = _call_at(frame)
    if call is None:
        return StepCall(file, line, None, "")
    span = span_of(call)
    text = ast.unparse(call)
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return StepCall(file, line, span, text)
    stepped = _value_of(call.func.value, frame)
    first = _value_of(call.args[0], frame) if call.args else None
    torch = _name_of(sys.modules.get("torch"), frame)
    name = ast.unparse(call.func.value)
    if stepped is optimizer:
        return StepCall(file, line, span, text, name, torch=torch)
    if first is not None and hasattr(stepped, "unscale_") and len(call.args) == 1:
        wrapper = None if first is optimizer else type(first).__name__
        return StepCall(file, line, span, text, ast.unparse(call.args[0]), wrapper, name, torch)
    if hasattr(stepped, "zero_grad") and hasattr(stepped, "param_groups"):
        return StepCall(file, line, span, text, name, type(stepped).__name__, torch=torch)
    return StepCall(file, line, span, text)


def span_of(node: ast.expr | ast.stmt) -> tuple[int, int, int, int]:
    """First line, column, last line, column; columns count bytes of UTF-8."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _call_at(frame: FrameType) -> ast.Call | None:
    """The call of the syntax tree that a frame is at; None where that is in doubt."""
    try:
        tree = ast.parse(Path(frame.f_code.co_filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [call for call in calls if _is_at(call, _position(frame))]
    if not found:  # Python was told to keep no columns (-X no_debug_ranges)
        found = [
            call
            for call in calls
            if call.lineno == frame.f_lineno
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "step"
        ]
    return found[0] if len(found) == 1 else None


def _position(frame: FrameType) -> tuple[int | None, ...]:
    """First line, last line, first column, last column of what a frame does now."""
    for number, position in enumerate(frame.f_code.co_positions()):
        if number == frame.f_lasti // 2:
            return position
    return (None,) * 4


def _is_at(call: ast.Call, position: tuple[int | None, ...]) -> bool:
    """Whether Python means this call."""
    line, end_line, column, end_column = position
    if (line, column, end_line, end_column) == span_of(call):
        return True
    # A method whose name stands on another line than its object: Python begins at that name.
    func = call.func
    if not isinstance(func, ast.Attribute) or func.lineno == func.end_lineno:
        return False
    end = (call.end_lineno, call.end_col_offset)
    return line == func.end_lineno and (end_line, end_column) == end


def _value_of(node: ast.expr, frame: FrameType) -> Any:
    """What a plain name, `a.b` or `a[0]` stands for; None for all else."""
    try:
        if isinstance(node, ast.Name):
            return {**frame.f_globals, **frame.f_locals}.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(_value_of(node.value, frame), node.attr, None)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Subscript):
            return _value_of(node.value, frame)[_value_of(node.slice, frame)]
    except Exception:  # a property or an index of the user's
        return None
    return None


def _name_of(value: Any, frame: FrameType) -> str | None:
    """The name of a value in a frame."""
    known = {**frame.f_globals, **frame.f_locals}
    return next((name for name, each in known.items() if each is value), None)


def frame_outside_wrappers() -> FrameType | None:
    """The innermost frame of the user's that is not of an optimizer, or of a wrapper around one.

    Where there are only such frames, the innermost.
    """
    frames = list(users_frames())
    for frame in frames:
        if not _is_of_a_wrapper(frame):
            return frame
    return frames[0] if frames else None


def _is_of_a_wrapper(frame: FrameType) -> bool:
    """Whether it is a method of an object that is an optimizer, or that holds one and no model."""
    code = frame.f_code
    if code.co_argcount == 0:
        return False
    owner = frame.f_locals.get(code.co_varnames[0])
    if isinstance(owner, Optimizer):
        return True
    held = list(getattr(owner, "__dict__", {}).values())
    # A trainer has both: there the line is where the user looks for it.
    has_model = any(isinstance(each, nn.Module) for each in held)
    return any(isinstance(each, Optimizer) for each in held) and not has_model
