"""Pages: each is one HTML file that opens from disk and needs no network.

It contains its style, script, plotting library and data. The data is JSON, and the script shows all
of it as text. A content security policy allows no other script, so that a label of a run can never
run as code.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.files import replace_text
from gossamer.runs.folder import to_json

if TYPE_CHECKING:
    from gossamer.report.page.data import PageData

_LIBRARY = "echarts/echarts.min.js"
_STYLES = ("page.css", "parts.css", "cluster.css", "print.css")
# A file that is used while the script loads comes before the files that use it.
_SCRIPTS = (
    "elements.js", "numbers.js", "state.js", "looks.js", "tables.js", "figures.js", "axes.js",
    "frame.js", "curves.js", "arrivals.js", "expenses.js", "time_use.js", "strip.js",
    "lineage.js", "staleness.js", "traffic.js", "topology.js", "cluster.js", "heat_map.js",
    "results.js", "advice.js", "contents.js", "page.js",
)  # fmt: skip


def write_page(path: Path, data: PageData) -> None:
    """Write the page of `data` in one step: a reader sees the old page or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, page_html(data))


def page_html(data: PageData) -> str:
    """The page of runs as text."""
    return html_text(
        data["title"] or "gossamer", data["verdict"], data["command"], data, _report_script(),
        [asset(name) for name in _STYLES], may_ask=bool(data["is_growing"]),
    )  # fmt: skip


def html_text(
    title: str,
    verdict: str,
    command: str,
    data: object,
    script: str,
    styles: Sequence[str],
    *,
    may_ask: bool = False,
) -> str:
    """A page with these data; title, verdict and command are what it says without a script."""
    library = asset(_LIBRARY)
    parts = {
        "policy": _policy((library, script), may_ask=may_ask),
        "title": html.escape(title),
        "verdict": html.escape(verdict),
        "command": html.escape(command),
        "style": "\n".join(styles),
        # The JSON text must not end its element or open a comment.
        "data": to_json(data).replace("<", "\\u003c"),
        "library": library,
        "script": script,
    }
    pieces = asset("page.html").split("@@")
    # Every second piece is a name; a single pass never searches the values for names.
    return "".join(parts[piece] if odd % 2 else piece for odd, piece in enumerate(pieces))


def _policy(scripts: tuple[str, ...], *, may_ask: bool) -> str:
    """Only the page's scripts may run, and only a growing page may connect, to its own server."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    asked = "'self'" if may_ask else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {asked}; base-uri 'none'; form-action 'none'"
    )


@cache
def asset(name: str) -> str:
    """The text of a file that pages are made of."""
    return (files("gossamer.report") / "assets" / name).read_text(encoding="utf-8")


def one_script(texts: Iterable[str]) -> str:
    """All texts inside one function, so that their names are not global."""
    return "\n".join(['(() => {\n"use strict";', *texts, "})();"])


@cache
def _report_script() -> str:
    return one_script(asset(name) for name in _SCRIPTS)
