"""The page that lists the runs of a folder. No torch."""

import html
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gradsight.show.page.assemble import filled, icon, policy, static_text
from gradsight.show.page.privacy import run_label, shareable
from gradsight.show.serve.listing import DAMAGED, ListedRun
from gradsight.values.health_report import worst
from gradsight.values.plain import counted
from gradsight.values.texts import for_terminal


def list_rows(runs: Sequence[ListedRun]) -> list[dict[str, Any]]:
    """The runs as the page takes them, the one that was written to last first."""
    latest = sorted(runs, key=lambda run: -run.written)
    return [
        {
            "name": for_terminal(run.name),
            "href": f"/run/{quote(run.name)}/",
            "status": run.status,
            "steps": run.steps,
            "text": for_terminal(shareable(run.text)),
            "written": run.written,
        }
        for run in latest
    ]


def list_page(folder: Path, runs: Sequence[ListedRun]) -> str:
    """The whole page; it is told of changes by its server."""
    theme = static_text("theme-first.js")
    style = static_text("page.css") + _own("list.css")
    script = _own("list.js")
    known = [run.status for run in runs if run.status != DAMAGED]
    values = {
        "POLICY": policy(style, (theme, script), live=True),
        "TITLE": html.escape(f"{counted(len(runs), 'run')} - {for_terminal(run_label(folder))}"),
        "ICON": html.escape(icon(worst(known))),
        "THEME": theme,
        "STYLE": style,
        "FOLDER": html.escape(for_terminal(run_label(folder))),
        "COUNT": counted(len(runs), "run"),
        "HIDDEN": " hidden" * bool(runs),
        "RUNS": "".join(map(_entry, list_rows(runs))),
        "SCRIPT": script,
    }
    return filled(_own("list.html"), values)


def _entry(run: dict[str, Any]) -> str:
    """A run's line; list.js makes the same."""
    safe = {key: html.escape(str(value)) for key, value in run.items()}
    data = f'data-run="{safe["name"]}" data-status="{safe["status"]}"'
    return (
        f'<li><a href="{safe["href"]}" {data} data-written="{safe["written"]}">'
        f'<span class="dot"></span><span class="name">{safe["name"]}</span>'
        f'<span class="number">{run["steps"]:,} steps</span>'
        f'<span class="text">{safe["status"]}: {safe["text"]}</span>'
        '<time class="when"></time></a></li>'
    )


def _own(name: str) -> str:
    return (files("gradsight.show.serve") / "static" / name).read_text(encoding="utf-8")
