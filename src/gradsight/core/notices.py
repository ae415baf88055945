"""One line for the person at the terminal, beside whatever their script prints. No torch.

Source lines and ids of samples are strangers' text, so that nothing in a line may move the cursor;
and whatever is wrong with the stream is no reason to disturb a training that goes on.
"""

import contextlib
import logging
import sys
from typing import TextIO

from gradsight.values.texts import on_one_line

_LOGGER = logging.getLogger("gradsight")
# What is logged has been said on standard error already: logging must not say it there too, where
# the user has set up none.
_LOGGER.addHandler(logging.NullHandler())


def notice(text: str) -> None:
    """Say one line on standard error. Nothing that is wrong with that stream reaches training."""
    log(text)
    write_line(text)


def write_line(text: str) -> None:
    """The same, for what is logged already."""
    # It may be closed, gone (a windowed program has none), or a stranger's object.
    try:
        stream = sys.stderr
        _put(encodable(f"gradsight: {on_one_line(text)}", stream), stream)
    except Exception as error:
        with contextlib.suppress(Exception):
            print(f"gradsight: {text!a} ({error})", file=sys.stderr)


def log(text: str) -> None:
    """Hand what is said to `logging.getLogger("gradsight")`; a handler that fails is the user's."""
    with contextlib.suppress(Exception):
        _LOGGER.warning("%s", text)


def encodable(text: str, stream: TextIO) -> str:
    r"""The text as this stream can take it: what its encoding lacks is written as an escape.

    >>> import io
    >>> encodable("2 → 3", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    '2 \\u2192 3'
    """
    encoding = getattr(stream, "encoding", None)
    if encoding is None:  # io.StringIO, which takes everything
        return text
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _put(line: str, stream: TextIO) -> None:
    # A bar of tqdm's stands in the middle of a line; tqdm takes it away and draws it again below.
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is not None and getattr(bars, "_instances", None):
        bars.write(line, file=stream)
        return
    stream.write(f"{line}\n")
    stream.flush()
