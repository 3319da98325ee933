"""`gossamer reproduce`: a published table, ours beside theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import Reporter, can_draw, out, print_json
from gossamer.commands.execute import recorded
from gossamer.commands.sweep import (
    DeviceOption,
    MinutesOption,
    ResumeOption,
    Setup,
    continued,
    run_sweep,
    say_how_to_go_on,
)
from gossamer.errors import ConfigurationError, unknown_name
from gossamer.lab.results import Results
from gossamer.report.folder import RunFolder
from gossamer.report.pictures import table_picture
from gossamer.reproductions import TABLES, Cell, PublishedTable
from gossamer.reproductions.table import Experiment


def reproduce(
    table: Annotated[str | None, typer.Argument(help="Which table; left out: list them.")] = None,
    seed: given.SeedOption = 0,
    data: given.DataOption = None,
    device: DeviceOption = None,
    threads: given.ThreadsOption = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small part with few epochs, of tables that train.")
    ] = False,
    resume: ResumeOption = None,
    minutes: MinutesOption = None,
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
    if chosen.experiment is None:
        asked = {"--data": data, "--device": device, "--quick": quick or None,
                 "--resume": resume, "--minutes": minutes}  # fmt: skip
        _refuse(chosen, [option for option, value in asked.items() if value is not None])
        _compute(chosen, seed, runs, as_json)
        return
    folder = None
    if resume is None:
        grid = chosen.experiment.grid(seed, quick)
        setup = Setup(chosen.experiment.task, data, device or "cpu", threads, grid, chosen.name)
    else:
        setup, folder = continued(resume, {"--quick": quick or None}, device, threads, data)
        if setup.table != chosen.name:
            raise ConfigurationError(
                f"{resume} holds {setup.table or 'another laboratory run'}, not {chosen.name}; "
                "name its own table"
            )
    _train(chosen, chosen.experiment, setup, folder, runs, minutes, as_json)


def _refuse(table: PublishedTable, options: list[str]) -> None:
    if options:
        trained = [name for name, one in TABLES.items() if one.experiment is not None]
        raise ConfigurationError(
            f"{table.name} is computed at once and without data; leave out {', '.join(options)}, "
            f"which {', '.join(trained)} take"
        )


def _compute(chosen: PublishedTable, seed: int, runs: Path, as_json: bool) -> None:
    """A table that takes no training."""
    assert chosen.compute is not None
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


def _train(
    chosen: PublishedTable,
    experiment: Experiment,
    setup: Setup,
    folder: RunFolder | None,
    runs: Path,
    minutes: float | None,
    as_json: bool,
) -> None:
    """A table whose cells are trainings of a laboratory grid."""
    task = given.load_task(setup.task, setup.data)
    setup.check(task, minutes)
    is_new = folder is None
    if is_new and given.keeps_folder(runs):
        folder = RunFolder.create(runs, f"reproduce-{chosen.name}")

    def described(results: Results) -> dict[str, Any]:
        cells = [cell.as_dict() for cell in experiment.cells(results)]
        return {"table": chosen.name, "cells": cells}

    run = run_sweep(task, setup, folder, is_new=is_new, minutes=minutes, described=described)
    cells = experiment.cells(run.results)
    _show(chosen, cells)
    out.print(
        f"this run: {run.results.grid.epochs:g} epochs, {len(cells)} cells of {chosen.cells}",
        markup=False,
    )
    if folder is not None and run.results.cells and can_draw():
        experiment.picture(folder.path / "table.png", run.results)
    say_how_to_go_on(run, folder, f"gossamer reproduce {chosen.name}")
    if as_json:
        print_json(run.summary)
    if run.ended == "interrupted":
        raise KeyboardInterrupt


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
        # A table in training may have holes.
        places = [by_place.get((row, column)) for column in columns]
        shown.add_row(row, *("." if cell is None else _cell(cell, table) for cell in places))
    if cells:
        out.print(shown)
    for line in _agreement(table, cells):
        out.print(line, markup=False, soft_wrap=True)
    out.print(table.settings, markup=False)


def _agreement(table: PublishedTable, cells: list[Cell]) -> list[str]:
    if table.experiment is not None:
        return [table.experiment.verdict(cells)]
    known = [cell for cell in cells if cell.deviation is not None]
    if not known:
        return []
    worst = max(known, key=lambda cell: abs(cell.deviation or 0.0))
    share = f"{100 * (worst.deviation or 0.0):+.1f} %"
    return [
        f"largest deviation of {len(known)} published cells: {share} ({worst.column}, {worst.row})",
        f"published figures: {known[0].evidence}",
    ]


def _cell(cell: Cell, table: PublishedTable) -> str:
    if table.experiment is not None:
        return table.experiment.show(cell)
    ours = f"{cell.ours:.3g} {table.unit}"
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
