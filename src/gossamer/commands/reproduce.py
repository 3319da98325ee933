"""`gossamer reproduce`: a published table, ours beside theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import Reporter, can_draw, out, print_json
from gossamer.commands.execute import recorded
from gossamer.errors import unknown_name
from gossamer.report.folder import RunFolder
from gossamer.report.pictures import table_picture
from gossamer.reproductions import TABLES, Cell, PublishedTable


def reproduce(
    table: Annotated[str | None, typer.Argument(help="Which table; left out: list them.")] = None,
    seed: given.SeedOption = 0,
    runs: given.RunsOption = Path("runs"),
    as_json: given.JsonOption = False,
) -> None:
    """Compute a published table, ours beside theirs."""
    if table is None:
        _list(as_json)
        return
    if table not in TABLES:
        raise unknown_name("table", table, TABLES)
    chosen = TABLES[table]
    folder = None
    if given.keeps_folder(runs):
        folder = RunFolder.create(runs, f"reproduce-{chosen.name}")
        folder.write_config({"table": chosen.name, "seed": seed, "settings": chosen.settings})
    with recorded(folder), Reporter(chosen.cells, chosen.name) as reporter:
        cells = chosen.compute(seed, reporter.finished)
    result: dict[str, Any] = {"table": chosen.name, "cells": [cell.as_dict() for cell in cells]}
    _show(chosen, cells)
    if folder is not None:
        folder.write_summary({"ended": "finished", **result})
        if can_draw():
            _picture(folder, chosen, cells)
        out.print(f"kept in {folder.path}", markup=False, soft_wrap=True)
    if as_json:
        print_json(result)


def _list(as_json: bool) -> None:
    listing = Table(title="Published tables", title_justify="left")
    for column in ("table", "what it shows", "source"):
        listing.add_column(column)
    for table in TABLES.values():
        listing.add_row(table.name, table.title, table.source)
    out.print(listing)
    if as_json:
        print_json({"tables": [{"name": t.name, "title": t.title} for t in TABLES.values()]})


def _show(table: PublishedTable, cells: list[Cell]) -> None:
    columns = list(dict.fromkeys(cell.column for cell in cells))
    rows = list(dict.fromkeys(cell.row for cell in cells))
    by_place = {(cell.row, cell.column): cell for cell in cells}
    shown = Table(title=f"{table.title} (ours | published)", title_justify="left")
    shown.add_column("")
    for column in columns:
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(row, *(_cell(by_place[row, column], table.unit) for column in columns))
    out.print(shown)
    known = [cell for cell in cells if cell.deviation is not None]
    if known:
        worst = max(known, key=lambda cell: abs(cell.deviation or 0.0))
        share = f"{100 * (worst.deviation or 0.0):+.1f} %"
        out.print(
            f"largest deviation of {len(known)} published cells: {share} "
            f"({worst.column}, {worst.row})",
            markup=False,
        )
        out.print(f"published figures: {known[0].evidence}", markup=False)
    out.print(table.settings, markup=False)


def _cell(cell: Cell, unit: str) -> str:
    ours = f"{cell.ours:.3g} {unit}"
    if cell.published is None or cell.deviation is None:
        return ours
    return f"{ours} | {cell.published:g} ({100 * cell.deviation:+.0f} %)"


def _picture(folder: RunFolder, table: PublishedTable, cells: list[Cell]) -> None:
    table_picture(
        folder.path / "table.png",
        table.title,
        list(dict.fromkeys(cell.row for cell in cells)),
        list(dict.fromkeys(cell.column for cell in cells)),
        published={(c.row, c.column): c.published for c in cells if c.published is not None},
        ours={(cell.row, cell.column): cell.ours for cell in cells},
        unit=table.unit,
    )
