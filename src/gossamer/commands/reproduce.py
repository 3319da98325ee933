"""`gossamer reproduce`: a published table, ours beside theirs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import Reporter, can_draw, command_line, out, print_json
from gossamer.commands.execute import recorded
from gossamer.commands.published import draw_table, show_table
from gossamer.commands.report import keep_report
from gossamer.commands.sweep import (
    DeviceOption,
    MinutesOption,
    ResumeOption,
    Setup,
    continued,
    run_sweep,
    say_how_to_go_on,
)
from gossamer.commands.trainings import continued_plan, planned, run_trainings
from gossamer.errors import ConfigurationError, unknown_name
from gossamer.quantities import counted
from gossamer.runs.folder import RunFolder
from gossamer.studies.lab.results import GridResults
from gossamer.studies.reproductions import TABLES, PublishedTable
from gossamer.studies.reproductions.table import Experiment
from gossamer.studies.reproductions.trainings import Trained

JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", help="So many trainings at a time, in processes; default: 1."),
]
# By kind of table: computed at once, a grid of the laboratory, single trainings.
_TRAINED = frozenset({"--data", "--device", "--quick", "--resume", "--minutes"})
_SINGLE = _TRAINED | {"--epochs", "--jobs"}


def reproduce(
    table: Annotated[str | None, typer.Argument(help="Which table; left out: list them.")] = None,
    seed: given.SeedOption = 0,
    data: given.DataOption = None,
    device: DeviceOption = None,
    threads: given.ThreadsOption = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small part with few epochs, of tables that train.")
    ] = False,
    epochs: Annotated[
        float | None,
        typer.Option("--epochs", help="Instead of the paper's; the schedule shrinks with them."),
    ] = None,
    jobs: JobsOption = None,
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
    changing = {"--quick": quick or None, "--epochs": epochs}
    _refuse(
        chosen,
        {"--data": data, "--device": device, **changing, "--jobs": jobs,
         "--resume": resume, "--minutes": minutes},
    )  # fmt: skip
    if chosen.trainings is not None:
        finished: dict[str, Trained] = {}
        if resume is None:
            plan = planned(
                chosen, seed=seed, quick=quick, epochs=epochs, data=data, device=device,
                threads=threads,
            )  # fmt: skip
        else:
            plan, finished = continued_plan(
                chosen, resume, asked=changing | {"--seed": seed or None}, data=data,
                device=device, threads=threads,
            )  # fmt: skip
        run_trainings(
            chosen, plan, resumed=resume, finished=finished, jobs=1 if jobs is None else jobs,
            minutes=minutes, runs=runs, as_json=as_json,
        )  # fmt: skip
    elif chosen.experiment is not None:
        setup, folder = _set_up(
            chosen, chosen.experiment, seed, quick, resume, device, threads, data
        )
        _train(chosen, chosen.experiment, setup, folder, runs, minutes, as_json)
    else:
        _compute(chosen, seed, runs, as_json)


def _set_up(
    chosen: PublishedTable,
    experiment: Experiment,
    seed: int,
    quick: bool,
    resume: Path | None,
    device: str | None,
    threads: int,
    data: Path | None,
) -> tuple[Setup, RunFolder | None]:
    if resume is None:
        grid = experiment.grid(seed, quick)
        return Setup(experiment.task, data, device or "cpu", threads, grid, chosen.name), None
    asked = {"--quick": quick or None, "--seed": seed or None}
    setup, folder = continued(resume, asked, device, threads, data)
    if setup.table != chosen.name:
        raise ConfigurationError(
            f"{resume} holds {setup.table or 'another laboratory run'}, not {chosen.name}; "
            "name its own table"
        )
    return setup, folder


def _taken(table: PublishedTable) -> frozenset[str]:
    if table.trainings is not None:
        return _SINGLE
    return frozenset() if table.experiment is None else _TRAINED


def _refuse(table: PublishedTable, asked: Mapping[str, object]) -> None:
    options = [o for o, value in asked.items() if value is not None and o not in _taken(table)]
    if options:
        takers = [name for name, one in TABLES.items() if _taken(one).issuperset(options)]
        why = "computed at once and without data" if table.experiment is None else "one fixed grid"
        raise ConfigurationError(
            f"{table.name} is {why}; leave out {', '.join(options)}, "
            f"which {', '.join(takers)} {'takes' if len(takers) == 1 else 'take'}"
        )


def _compute(chosen: PublishedTable, seed: int, runs: Path, as_json: bool) -> None:
    """A table that takes no training."""
    assert chosen.compute is not None
    folder = None
    if given.keeps_folder(runs):
        folder = RunFolder.create(runs, f"reproduce-{chosen.name}")
        config = {"table": chosen.name, "seed": seed, "settings": chosen.settings}
        folder.write_config({**config, "command_line": command_line()})
    with recorded(folder), Reporter(chosen.cells, chosen.name) as reporter:
        cells = chosen.compute(seed, reporter.finished)
    result: dict[str, Any] = {"table": chosen.name, "cells": [cell.as_dict() for cell in cells]}
    show_table(chosen, cells)
    if as_json:
        print_json(result)
    if folder is not None:
        folder.write_summary({"ended": "finished", **result})
        if can_draw():
            draw_table(folder, chosen, cells)
        out.print(f"kept in {folder.path}", markup=False, soft_wrap=True)
        keep_report(folder)


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

    def described(results: GridResults) -> dict[str, Any]:
        cells = [cell.as_dict() for cell in experiment.cells(results)]
        return {"table": chosen.name, "cells": cells}

    run = run_sweep(task, setup, folder, is_new=is_new, minutes=minutes, described=described)
    cells = experiment.cells(run.results)
    show_table(chosen, cells)
    out.print(
        f"this run: {counted(run.results.grid.epochs, 'epoch')}, "
        f"{counted(len(cells), 'cell')} of {chosen.cells}",
        markup=False,
    )
    if as_json:
        print_json(run.summary)
    if folder is not None and run.results.cells and can_draw():
        experiment.picture(folder.path / "table.png", run.results)
    say_how_to_go_on(run, folder, f"gossamer reproduce {chosen.name}")
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
