"""Records as HTML for notebooks: a sentence and a small table, and nothing that could run.

Notebooks show what `_repr_html_` returns. Colours are left to the notebook, light or dark.
"""

from collections.abc import Iterable, Sequence

from gradsight.values.texts import for_html


def html_card(
    title: str, rows: Iterable[Sequence[object]], headings: Sequence[str] = (), note: str = ""
) -> str:
    """A title, a table, and a line below it."""
    parts = [f"<p><b>{for_html(title)}</b></p>"]
    lines = [_row(row, "td") for row in rows]
    if lines:
        head = f"<thead>{_row(headings, 'th')}</thead>" if headings else ""
        parts.append(f"<table>{head}<tbody>{''.join(lines)}</tbody></table>")
    if note:
        parts.append(f"<p>{for_html(note)}</p>")
    return f"<div>{''.join(parts)}</div>"


def _row(cells: Sequence[object], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{for_html(str(cell))}</{tag}>' for cell in cells)}</tr>"
