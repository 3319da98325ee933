"""What the papers and the survey have, with the command that shows it: read from `map.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MapRow:
    """One system, algorithm or experiment."""

    section: str
    what: str
    command: str
    """What shows it; several commands in turn are joined by `&&`. Empty where it is left out."""
    why_not: str = ""

    @property
    def commands(self) -> list[str]:
        return self.command.split(" && ") if self.command else []


@cache
def map_rows() -> tuple[MapRow, ...]:
    """The whole table."""
    text = (Path(__file__).parent / "map.toml").read_text(encoding="utf-8")
    sections: list[dict[str, Any]] = tomllib.loads(text)["section"]
    return tuple(MapRow(one["title"], *row) for one in sections for row in one["rows"])


def rows_about(word: str) -> list[MapRow]:
    """The rows in which a word stands, in any case."""
    return [
        row for row in map_rows()
        if any(word.lower() in text.lower() for text in (row.section, row.what, row.command))
    ]  # fmt: skip


def map_page(rows: Sequence[MapRow]) -> str:
    """The rows as a page of Markdown."""
    lines = [
        "# The map",
        "",
        "Every system, algorithm and experiment of the papers that Gossamer is built on, and of",
        "the survey of Ben-Nun and Hoefler, with the command that shows it, or with the reason why",
        "it is left out. This page is what `gossamer map --markdown` prints. A test runs the",
        "commands, so none of them is out of date.",
    ]
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines += ["", f"## {section}", "", "| what | how to see it |", "|---|---|"]
        shown = "<br>".join(f"`{one}`" for one in row.commands) or f"left out: {row.why_not}"
        lines.append(f"| {row.what} | {shown} |")
    return "\n".join(lines) + "\n"
