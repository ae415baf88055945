r"""A stranger's text on a terminal, in Markdown and in HTML: nothing in it is obeyed. No torch.

Names, messages, ids and errors of a run may have been written by anybody. Shown as they are, they
could clear the screen, set the clipboard, turn a line around, or write headings, links and HTML
into a report. Every text of a record passes through one of these on its way to a reader:

    for_terminal    lines of a terminal or a pipe: what would steer it is shown as an escape
    in_a_column     the same, short: samples and ids in tables
    for_markdown    text of a Markdown paragraph, list item, heading or cell of a table
    in_code         the same between two backticks
    fenced          a block of code of its own
    for_html        text or the value of an attribute of HTML

All of them show the beginning of a text that is longer than anything people write.
"""

import dataclasses
import html
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
MOST = 4096
"""Characters of one text that are shown."""

# C0 beside tab and line feed, DEL and C1; what orders signs from right to left; separators of
# lines; signs that are not seen; halves of characters. Not the joiners that scripts and emoji need.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
# Code may compare with anything; what is left of it is HTML that somebody might take for some.
_TAG = re.compile(
    r"<(?=/?(?:script|img|iframe|svg|style|object|embed|link|meta|form|body|html|input|video|audio)"
    r"\b|!--)",
    re.IGNORECASE,
)
_AT_THE_START = re.compile(r"\d{1,9}(?=[.)](?:\s|$))|(?=[-+](?:\s|$))|(?=[#>~[]|---|``)")
_INSIDE = re.compile(
    r"(?P<backslash>\\(?=[!-/:-@\[-`{-~]))"
    r"|(?P<tag><(?=[A-Za-z/!?]))"
    r"|(?P<entity>&(?=#|[A-Za-z][A-Za-z0-9]*;))"
    r"|(?P<sign>[`*|]|\](?=[(\[:])|(?<=:)/(?=/)|(?<=[wW]{3})\.)"
)


def for_terminal(text: str) -> str:
    r"""Text for a terminal or a pipe; line breaks and tabs stay.

    >>> for_terminal("\x1b]52;c;AAAA\x07name\u202eeman\r\n\x9b2J")
    '\\x1b]52;c;AAAA\\x07name\\u202eeman\\r\n\\x9b2J'
    """
    return _STEERING.sub(_escape, beginning(text))


def on_one_line(text: str) -> str:
    r"""The same without line breaks and tabs.

    >>> on_one_line("a\n\tb")
    'a b'
    """
    return " ".join(for_terminal(text).split())


def in_a_column(text: str) -> str:
    r"""The same for a column, where width is scarce: a dot for what would steer, ⏎ for a new line.

    >>> in_a_column("if x:\n\treturn \x1b[31mred")
    'if x:⏎return ·[31mred'
    """
    # Indentation goes with its line break.
    line = re.sub(r"\s*\n\s*", "⏎", text[:MOST].strip(" \t")).replace("\t", " ")
    return "".join(sign if sign.isprintable() else "·" for sign in line)


def for_markdown(text: str) -> str:
    r"""Text for Markdown, on one line; `code` between single backticks stays code.

    >>> for_markdown("# big <b>|[x](http://y.z) `a|b`")
    '\\# big &lt;b>\\|[x\\](http:\\//y.z) `a¦b`'
    """
    line = on_one_line(text)
    pieces = []
    end = 0
    for span in _CODE.finditer(line):
        pieces += [_escaped(line[end : span.start()]), f"`{in_code(span[1])}`"]
        end = span.end()
    pieces.append(_escaped(line[end:]))
    whole = "".join(pieces)
    start = _AT_THE_START.match(whole)
    if start is None:
        return whole
    return f"{start[0]}\\{whole[start.end() :]}"


def in_code(text: str) -> str:
    r"""Text for between two backticks, also in a table: signs that would end it have a likeness.

    >>> in_code("a`b|c <script>")
    "a'b¦c ‹script>"
    """
    line = on_one_line(text).replace("`", "'").replace("|", "¦")
    # Inside code it is only text; not every program that shows Markdown knows that.
    return re.sub(r"<(?=[A-Za-z/!?])", "‹", line)


def fenced(lines: list[str], language: str = "") -> list[str]:
    """Lines of code between fences that none of them closes.

    >>> fenced(["```", "x"], "python")
    ['````python', '```', 'x', '````']
    """
    text = "\n".join(_TAG.sub("‹", for_terminal(line)) for line in lines)
    code = text.split("\n")
    runs = [len(run) for line in code for run in re.findall("`+", line)]
    fence = "`" * max(3, *(run + 1 for run in runs), 0)
    return [f"{fence}{language}", *code, fence]


def for_html(text: str) -> str:
    """Text for HTML, also in the value of an attribute between quotes.

    >>> for_html('<a href="x">')
    '&lt;a href=&quot;x&quot;&gt;'
    """
    return html.escape(for_terminal(text), quote=True)


def cleaned(record: T, clean: Callable[[str], str]) -> T:
    """A record, or anything made of records, with each text in it cleaned, keys of mappings too.

    New fields are covered as soon as there are any.
    """
    made: Any = record
    if isinstance(record, str):
        made = clean(record)
    elif dataclasses.is_dataclass(record) and not isinstance(record, type):
        fields = [field.name for field in dataclasses.fields(record) if field.init]
        values = {name: cleaned(getattr(record, name), clean) for name in fields}
        made = dataclasses.replace(record, **values)
    elif isinstance(record, tuple | list):
        made = type(record)(cleaned(each, clean) for each in record)
    elif isinstance(record, Mapping):
        made = {cleaned(key, clean): cleaned(each, clean) for key, each in record.items()}
    return made  # type: ignore[no-any-return]


def beginning(text: str) -> str:
    """Text as far as it is shown."""
    if len(text) <= MOST:
        return text
    return f"{text[:MOST]}… ({len(text):,} characters)"


def _escape(sign: re.Match[str]) -> str:
    return sign[0].encode("unicode_escape").decode("ascii")


def _escaped(text: str) -> str:
    """Text between spans of code, in which nothing has a meaning any more."""
    return _INSIDE.sub(_without_meaning, text)


def _without_meaning(found: re.Match[str]) -> str:
    entities = {"<": "&lt;", "&": "&amp;"}
    return entities.get(found[0], f"\\{found[0]}")
