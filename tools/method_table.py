"""Rewrite the table of methods in README.md from the registry: `python tools/method_table.py`.

The table lies between two comments that a reader does not see; everything else stays as it is.
"""

from __future__ import annotations

from pathlib import Path

from gossamer.methods import METHODS, Method

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- methods: written by tools/method_table.py -->"
END = "<!-- methods: end -->"
COLUMNS = (
    "method", "paper", "you get", "keeps the mean", "waits for", "staleness", "survives a death",
    "models sent per step",
)  # fmt: skip


def cells(method: Method) -> tuple[str, ...]:
    """One row, in the order of the columns."""
    promises = method.promises
    return (
        f"`{method.name}`",
        method.paper,
        method.output,
        "yes" if promises.keeps_mean else "no",
        promises.waits_for,
        promises.staleness,
        "yes" if promises.survives_death else "no",
        promises.traffic,
    )


def table() -> str:
    """The whole table in Markdown, methods in the order of the registry."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *(cells(method) for method in METHODS.values())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def updated(text: str) -> str:
    """The text with the table of today between the two comments."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
