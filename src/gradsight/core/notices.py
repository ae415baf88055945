"""One line for the person at the terminal, beside whatever their script prints. No torch."""

import contextlib
import sys
from typing import TextIO


def notice(text: str) -> None:
    """Say one line on standard error. Nothing that is wrong with that stream reaches training."""
    # It may be closed, gone (a windowed program has none), or a stranger's object.
    with contextlib.suppress(Exception):
        stream = sys.stderr
        _put(encodable(f"gradsight: {_on_one_line(text)}", stream), stream)


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


def _on_one_line(text: str) -> str:
    """Source lines and ids of samples are strangers' text: nothing in it may move the cursor."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def _put(line: str, stream: TextIO) -> None:
    # A bar of tqdm's stands in the middle of a line; tqdm takes it away and draws it again below.
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is not None and getattr(bars, "_instances", None):
        bars.write(line, file=stream)
        return
    stream.write(f"{line}\n")
    stream.flush()
