"""One HTML file out of the parts of the page. No torch.

The script is one: uPlot, then the page's modules in the order in which they need each other, with
their `import` lines left out and the word `export` taken away. So their top-level names share one
scope, and no name may be used twice; a test holds them to it. No build step is needed.

The Content-Security-Policy allows nothing but this script and this style, by their hashes: even if
a stranger's text became markup, nothing in it would run, and nothing could be asked for.
"""

import base64
import functools
import hashlib
import html
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from gradsight.show.page.payload import embedded

MODULES = (
    "words.js",
    "decode.js",
    "served.js",
    "source.js",
    "state.js",
    "theme.js",
    "colours.js",
    "rows.js",
    "view.js",
    "heat.js",
    "lines.js",
    "spectrum.js",
    "experts.js",
    "findings.js",
    "sections.js",
    "keys.js",
    "main.js",
)
"""In the order of their need: each may import only from those before it."""
_FOLDER = "gradsight.show.page"
_IMPORT = re.compile(r"^import\s.*?;\s*$", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class) )", re.MULTILINE)
_COMMENTS = ("//", "/**", "*")
_DOTS = {"critical": "#c4314b", "warning": "#b7791f", "healthy": "#2f855a"}


def page(payload: Mapping[str, Any], live: bool = False) -> str:
    """The page of a run, whole; `live`: it asks its own server for what it shows."""
    theme = static_text("theme-first.js")
    style = _vendor("uPlot.min.css") + static_text("page.css")
    script = _script()
    values = {
        "POLICY": policy(style, (theme, script), live),
        "TITLE": html.escape(f"{payload['counts']} - {payload['run']}"),
        "ICON": html.escape(icon(payload["status"])),
        "STATUS": html.escape(payload["status"]),
        "THEME": theme,
        "STYLE": style,
        "DATA": embedded(dict(payload)),
        "SCRIPT": script,
    }
    return filled(static_text("index.html"), values)


def filled(template: str, values: Mapping[str, str]) -> str:
    """A page out of its template, in which names stand between pairs of @@."""
    # Every second part is a name: what is put in is never looked at again.
    parts = template.split("@@")
    return "".join(values[part] if at % 2 else part for at, part in enumerate(parts))


def icon(status: str) -> str:
    """A dot in the colour of the verdict, as the address of a picture."""
    dot = f"<circle cx='8' cy='8' r='7' fill='{_DOTS[status]}'/>"
    drawn = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>{dot}</svg>"
    return f"data:image/svg+xml,{drawn.replace('#', '%23')}"


def policy(style: str, scripts: tuple[str, ...], live: bool) -> str:
    """What a page may do: run its own script, and where it is live ask its own server."""
    hashes = " ".join(_hash(script) for script in scripts)
    rules = ["default-src 'none'", f"script-src {hashes}", f"style-src {_hash(style)}"]
    rules += ["img-src data:", "base-uri 'none'", "form-action 'none'"]
    if live:
        rules.append("connect-src 'self'")
    return "; ".join(rules)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@functools.cache
def _script() -> str:
    """Everything that runs, as one module."""
    parts = [_vendor("uPlot.iife.min.js"), *(joinable(static_text(name)) for name in MODULES)]
    return "\n".join(parts)


def joinable(module: str) -> str:
    """A module without its imports, exports, comments and indentation.

    >>> joinable('import { a } from "./a.js";\\nexport function b() { return a; }')
    'function b() { return a; }'
    """
    lines = _EXPORT.sub("", _IMPORT.sub("", module)).splitlines()
    bare = [line.strip() for line in lines]
    # Comments and indentation are for those who read the modules, not for every page.
    return "\n".join(line for line in bare if line and not line.startswith(_COMMENTS))


@functools.cache
def static_text(name: str) -> str:
    """A file of the page."""
    return (files(_FOLDER) / "static" / name).read_text(encoding="utf-8")


@functools.cache
def _vendor(name: str) -> str:
    return (files(_FOLDER) / "vendor" / name).read_text(encoding="utf-8")
