"""Where in a script an optimizer is made, and where it steps."""

from types import FrameType

from torch import nn
from torch.optim import Optimizer

from gradsight.core.source import users_frames


def frame_of_construction() -> FrameType | None:
    """Return the innermost frame of the user's that is not of an optimizer's own constructor."""
    frames = list(users_frames())
    outside = (frame for frame in frames if not isinstance(_owner(frame), Optimizer))
    return next(outside, frames[0] if frames else None)


def _owner(frame: FrameType) -> object:
    """Return the first argument of a function that is running: the object of a method."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


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
    owner = _owner(frame)
    if isinstance(owner, Optimizer):
        return True
    if owner is None or isinstance(owner, nn.Module):
        return False
    held = list(getattr(owner, "__dict__", {}).values())
    # A trainer has both: there the line is where the user looks for it.
    has_model = any(isinstance(each, nn.Module) for each in held)
    return any(isinstance(each, Optimizer) for each in held) and not has_model
