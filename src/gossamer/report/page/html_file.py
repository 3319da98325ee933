"""The page of a run: one HTML file that opens from disk and asks nothing of any network.

Style, script, plotting library and data are all inside. The data travels as JSON and the script
shows every word of it as text; a policy in the page lets no other script run, so that a label,
whoever wrote it, stays a label.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.runs.folder import to_json

if TYPE_CHECKING:
    from gossamer.report.page.data import PageData

_LIBRARY = "echarts/echarts.min.js"
_STYLES = ("page.css", "parts.css", "cluster.css", "print.css")
# In this order: what is used while the script loads stands before what uses it.
_SCRIPTS = (
    "elements.js",
    "numbers.js",
    "state.js",
    "looks.js",
    "tables.js",
    "figures.js",
    "axes.js",
    "curves.js",
    "arrivals.js",
    "time_use.js",
    "strip.js",
    "staleness.js",
    "traffic.js",
    "topology.js",
    "cluster.js",
    "heat_map.js",
    "results.js",
    "advice.js",
    "contents.js",
    "page.js",
)


def write_page(path: Path, data: PageData) -> None:
    """Write the page of `data`; who reads `path` meanwhile sees the old page or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = page_html(data)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as page:
            page.write(whole)
        # A temporary file is private to its owner; a page is for whoever may read the folder.
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def page_html(data: PageData) -> str:
    """The page as text."""
    library, script = _asset(_LIBRARY), _script()
    parts = {
        "policy": _policy((library, script), may_ask=bool(data["is_growing"])),
        "title": html.escape(data["title"] or "gossamer"),
        "verdict": html.escape(data["verdict"]),
        "command": html.escape(data["command"]),
        "style": "\n".join(_asset(name) for name in _STYLES),
        # Nothing in a JSON text may end the element that it stands in, or open a comment there.
        "data": to_json(data).replace("<", "\\u003c"),
        "library": library,
        "script": script,
    }
    pieces = _asset("page.html").split("@@")
    # Every second piece is a name: one pass, so that no value is searched for names.
    return "".join(parts[piece] if odd % 2 else piece for odd, piece in enumerate(pieces))


def _policy(scripts: tuple[str, ...], *, may_ask: bool) -> str:
    """Only our scripts run, by their digests; only a growing page asks, and only its own server."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    asked = "'self'" if may_ask else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {asked}; base-uri 'none'; form-action 'none'"
    )


@cache
def _asset(name: str) -> str:
    return (files("gossamer.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """One function around all files: they share their names with each other and nobody else."""
    return "\n".join(['(() => {\n"use strict";', *(_asset(name) for name in _SCRIPTS), "})();"])
