"""Text on a terminal: colour, and lines of a width. No torch."""

import json
import os
from collections.abc import Mapping
from typing import TextIO

from rich.cells import cell_len, set_cell_size

from gradsight.values.plain import plain
from gradsight.values.texts import for_terminal, in_a_column

BOLD = "1"
GREEN = "32"
RED = "31"
YELLOW = "33"

WIDTH = 79
"""Columns of a line: with 80 some terminals break it."""

SCHEMA = 1
"""Of what `--json` prints; higher when a field's meaning changes, not when one is added."""


def wants_colour(stream: TextIO) -> bool:
    """Whether to colour: on a terminal that can, unless NO_COLOR says otherwise."""
    # "dumb" is what editors and CI say whose terminals would show the codes themselves.
    dumb = os.environ.get("TERM", "") in ("dumb", "unknown")
    return stream.isatty() and not dumb and not os.environ.get("NO_COLOR")


def tinted(text: str, code: str, colour: bool) -> str:
    """Text in the colour of a terminal's code, such as "1;31" for bold red; plain without colour.

    >>> tinted("fine", GREEN, True), tinted("fine", GREEN, False)
    ('\\x1b[32mfine\\x1b[0m', 'fine')
    """
    if not colour or not text:
        return for_terminal(text)
    return f"\033[{code}m{for_terminal(text)}\033[0m"


def json_text(values: Mapping[str, object]) -> str:
    """What every `--json` prints: one object of strict JSON, in which nothing steers a terminal."""
    whole = plain({"schema": SCHEMA, **values})
    # json escapes what is not ASCII, but not DEL, which is.
    return json.dumps(whole, indent=1, allow_nan=False).replace("\x7f", "\\u007f")


def shortened(text: str, width: int) -> str:
    """Text on one line of exactly this width, whose end is cut off or filled up.

    >>> shortened("if x:\\n\\treturn \\x1b[31mred", 30).rstrip()
    'if x:⏎return ·[31mred'
    >>> shortened("abcdefgh", 5)
    'abcd…'
    """
    line = in_a_column(text)
    # Columns of the terminal, not characters: some take two, some none.
    if cell_len(line) <= width:
        return set_cell_size(line, width)
    return set_cell_size(line, width - 1) + "…"
