"""Rewrite the tables that the registries decide: `python tools/method_table.py`.

Methods are listed in README.md; compressors, and what goes with what, in docs/compression.md. Each
table lies between two comments that a reader does not see; everything else stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gossamer.compression import COMPRESSORS, parse_compressor
from gossamer.compression.coding_times import layout_like
from gossamer.compression.pairing import EXCHANGES, refusal
from gossamer.compression.registry import CompressorRow
from gossamer.methods import METHODS, Method

ROOT = Path(__file__).resolve().parent.parent
_PARAMETERS = 10_000_000
"""Of the transformer whose bits per parameter are listed."""


def _yes(claim: bool) -> str:
    return "yes" if claim else "no"


def method_cells(method: Method) -> tuple[str, ...]:
    """One row, in the order of the columns."""
    promises = method.promises
    return (
        f"`{method.name}`",
        method.paper,
        method.output,
        _yes(promises.keeps_mean),
        promises.waits_for,
        promises.staleness,
        _yes(promises.survives_death),
        promises.traffic,
    )


def compressor_cells(row: CompressorRow) -> tuple[str, ...]:
    """One row of the table of compressors."""
    layout = layout_like(_PARAMETERS)
    bits = 8 * parse_compressor(row.name).size(layout) / layout.total
    return (
        f"`{row.name}`",
        row.paper,
        f"{bits:.3g}",
        "summed" if row.is_linear else "gathered",
        _yes(row.is_unbiased),
        "on" if row.has_feedback else "off",
    )


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def methods() -> str:
    """Methods in the order of the registry."""
    columns = (
        "method", "paper", "you get", "keeps the mean", "waits for", "staleness",
        "survives a death", "models sent per step",
    )  # fmt: skip
    return markdown(columns, [method_cells(method) for method in METHODS.values()])


def compressors() -> str:
    columns = ("compressor", "paper", "bits", "on the way", "unbiased", "feedback")
    return markdown(columns, [compressor_cells(row) for row in COMPRESSORS.values()])


def pairs() -> str:
    """Every compressor with every kind of exchange, and why a pair is refused."""
    reasons: list[str] = []

    def cell(kind: str, name: str) -> str:
        reason = refusal(kind, parse_compressor(name))
        if reason is None:
            return "yes" if kind != "gradients" or COMPRESSORS[name].rate == 1 else "yes*"
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({reasons.index(reason) + 1})"

    kinds = [kind for kind, row in EXCHANGES.items() if not row.reason]
    rows = [(f"`{name}`", *(cell(kind, name) for kind in kinds)) for name in COMPRESSORS]
    whole = [(kind, row) for kind, row in EXCHANGES.items() if row.reason]
    users = {
        kind: ", ".join(f"`{m.name}`" for m in METHODS.values() if m.exchange == kind)
        for kind in EXCHANGES
    }
    return "\n".join([
        markdown(("", *kinds), rows), "",
        *(f"({number}) {reason}." for number, reason in enumerate(reasons, start=1)), "",
        markdown(
            ("exchange", "what travels", "methods"),
            [(kind, EXCHANGES[kind].what, users[kind]) for kind in kinds],
        ), "",
        *(f"- No compressor with {users[kind]} ({row.what}): {row.reason}." for kind, row in whole),
    ])  # fmt: skip


TABLES = {
    ROOT / "README.md": {"methods": methods},
    ROOT / "docs" / "compression.md": {"compressors": compressors, "pairs": pairs},
}


def updated(path: Path) -> str:
    """The page with the tables of today."""
    text = path.read_text(encoding="utf-8")
    for name, table in TABLES[path].items():
        begin = f"<!-- {name}: written by tools/method_table.py -->"
        end = f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{table()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for page in TABLES:
        page.write_text(updated(page), encoding="utf-8")
