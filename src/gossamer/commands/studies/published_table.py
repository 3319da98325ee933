"""Print and draw a published table: our numbers beside the published ones."""

from __future__ import annotations

import math

from rich.table import Table

from gossamer.commands.console import out, say_line
from gossamer.report.pictures.run_pictures import table_picture
from gossamer.runs.folder import RunFolder
from gossamer.studies.reproductions import PublishedCell, PublishedTable


def show_table(table: PublishedTable, cells: list[PublishedCell]) -> None:
    columns = list(dict.fromkeys(cell.column for cell in cells))
    rows = list(dict.fromkeys(cell.row for cell in cells))
    by_place = {(cell.row, cell.column): cell for cell in cells}
    shown = Table(title=f"{table.title} (ours | published)", title_justify="left")
    shown.add_column("")
    for column in columns:
        shown.add_column(column, justify="right")
    for row in rows:
        # Cells that are not trained yet are missing.
        places = [by_place.get((row, column)) for column in columns]
        shown.add_row(row, *("." if cell is None else _cell(cell, table) for cell in places))
    if cells:
        out.print(shown)
    for line in _agreement(table, cells):
        say_line(line)
    out.print(table.settings, markup=False)


def draw_table(folder: RunFolder, table: PublishedTable, cells: list[PublishedCell]) -> None:
    table_picture(
        folder.path / "table.png",
        table.title,
        list(dict.fromkeys(cell.row for cell in cells)),
        list(dict.fromkeys(cell.column for cell in cells)),
        published={(c.row, c.column): c.published for c in cells if c.published is not None},
        ours={(cell.row, cell.column): cell.ours for cell in cells},
        unit=table.unit,
    )


def _agreement(table: PublishedTable, cells: list[PublishedCell]) -> list[str]:
    own = table.experiment or table.trainings
    if own is not None:
        return own.verdict(cells).splitlines()
    if table.verdict is not None:
        return table.verdict(cells).splitlines()
    known = [cell for cell in cells if cell.deviation is not None]
    if not known:
        return []
    worst = max(known, key=lambda cell: abs(cell.deviation or 0.0))
    share = f"{100 * (worst.deviation or 0.0):+.1f} %"
    return [
        f"largest deviation of {len(known)} published cells: {share} ({worst.column}, {worst.row})",
        f"published figures: {known[0].evidence}",
    ]


def _cell(cell: PublishedCell, table: PublishedTable) -> str:
    own = table.experiment or table.trainings
    if own is not None:
        return own.show(cell)
    within = "" if cell.half_width is None else f" ± {cell.half_width:.2g}"
    # A table of counts has no unit.
    ours = "not reached" if math.isnan(cell.ours) else f"{cell.ours:.3g}{within} {table.unit}"
    ours = ours.rstrip()
    if cell.published is None or cell.deviation is None:
        return ours
    return f"{ours} | {cell.published:g} ({100 * cell.deviation:+.0f} %)"
