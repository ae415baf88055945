"""Signs that an output's encoding does not have, in ASCII. No torch.

Done where text is encoded, so that it holds for whatever is written: tables, help, bars, errors.
"""

import codecs
import io
import unicodedata
from typing import TextIO

_WORDS = {
    "✅": "[ok]",
    "✓": "[ok]",
    "❌": "[!!]",
    "✗": "[!!]",
    "⚠": "[!]",
    "\ufe0f": "",  # asks for the coloured form of the sign before it
    "→": "->",
    "≥": ">=",
    "≤": "<=",
}
# Curves, bars and cut-off texts stand in columns: one sign for one.
_IN_COLUMNS = dict(zip("▁▂▃▄▅▆▇█…–—−·×⏎•", "_.-:=+*#~---.x/*", strict=True))
_SIGNS = {**_WORDS, **_IN_COLUMNS}
_NAME = "gradsight.ascii"


def in_ascii(text: str) -> str:
    """Text in ASCII, with a question mark for what has no likeness there.

    >>> in_ascii("✅ loss 4.2 → 1.5 ▁▃▅█ of naïve, 日本")
    '[ok] loss 4.2 -> 1.5 _-=# of naive, ??'
    """
    return "".join(_SIGNS[sign] if sign in _SIGNS else _likeness(sign) for sign in text)


def _likeness(sign: str) -> str:
    """A letter without its accents; a question mark where nothing is left."""
    plain = unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode()
    return plain or "?"


def _encode_rest(error: UnicodeError) -> tuple[str, int]:
    """What Python calls with the part of a text that it cannot encode."""
    assert isinstance(error, UnicodeEncodeError)
    return in_ascii(error.object[error.start : error.end]), error.end


def never_fail_to_encode(*streams: TextIO) -> None:
    """From now on, what a stream's encoding lacks is written to it in ASCII."""
    codecs.register_error(_NAME, _encode_rest)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_NAME)
