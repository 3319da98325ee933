"""`gossamer reproduce`: compute a published table, our numbers beside the published ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.commands import options as given
from gossamer.commands.console import Reporter, can_draw, out, print_json, say, titled_table
from gossamer.commands.kept_run import kept_run
from gossamer.commands.studies.batch import (
    BatchOptions,
    BatchPlan,
    MachineOptions,
    continued_plan,
    new_plan,
    run_batch,
)
from gossamer.commands.studies.grid_batch import GridBatch, continued_grid, grid_plan
from gossamer.commands.studies.published_table import draw_table, show_table
from gossamer.commands.studies.training_batch import KEYS, TrainingsBatch
from gossamer.commands.studies.trials_batch import TrialsBatch
from gossamer.commands.work.jobs import number_of_jobs
from gossamer.errors import ConfigurationError, unknown_name
from gossamer.quantities import counted
from gossamer.runs.folder import RunFolder
from gossamer.studies.lab.results import GridResults
from gossamer.studies.reproductions import TABLES, PublishedTable
from gossamer.studies.reproductions.table import Experiment
from gossamer.tasks import Task

# The options of tables that are a grid of the laboratory, and of tables of single trainings.
_TRAINED = frozenset(
    {"--data", "--device", "--precision", "--quick", "--resume", "--minutes", "--jobs"}
)
_SINGLE = _TRAINED | {"--epochs", "--seeds"}
_TRIALS = frozenset({"--resume", "--minutes"})


@given.with_groups
def reproduce(
    table: Annotated[str | None, typer.Argument(help="Which table; left out: list them.")] = None,
    seed: given.SeedOption = 0,
    machine: MachineOptions = MachineOptions(),
    quick: Annotated[
        bool, given.shown("A small part with few epochs, of tables that train.", "--quick")
    ] = False,
    epochs: Annotated[
        float | None, given.shown("Instead of the paper's; the schedule shrinks with them.")
    ] = None,
    seeds: Annotated[
        int | None,
        given.shown("So many seeds of each cell; default: the table's, or 1 with --quick."),
    ] = None,
    jobs: given.JobsOption = None,
    options: BatchOptions = BatchOptions(),
) -> None:
    """Compute a published table, ours beside theirs."""
    if table is None:
        _list(options.as_json)
        return
    if table not in TABLES:
        raise unknown_name("table", table, TABLES)
    chosen, resume = TABLES[table], options.resume
    changing = {"--quick": quick or None, "--epochs": epochs, "--seeds": seeds}
    limits = {"--resume": resume, "--minutes": options.minutes}
    machine_asked = {
        "--data": machine.data, "--device": machine.device, "--precision": machine.precision,
    }  # fmt: skip
    _refuse(chosen, {**machine_asked, **changing, "--jobs": jobs, **limits})
    asked = changing | {"--seed": seed or None}
    if chosen.trainings is not None:
        if resume is not None:
            plan = continued_plan(resume, machine, asked, KEYS, "trainings")
        else:
            full, short = chosen.trainings.epochs, chosen.trainings.quick_epochs
            length = epochs if epochs is not None else short if quick else full
            usual = 1 if quick else chosen.trainings.seeds
            choices = {
                "table": table, "seed": seed, "quick": quick, "epochs": length,
                "seeds": usual if seeds is None else seeds,
            }  # fmt: skip
            plan = new_plan(choices, machine)
        _check_table(resume, plan, table)
        batch = TrainingsBatch(chosen, chosen.trainings, plan, options, number_of_jobs(jobs))
    elif chosen.experiment is not None:
        if resume is not None:
            plan = continued_grid(resume, machine, asked)
        else:
            grid = chosen.experiment.grid(seed, quick)
            plan = grid_plan(chosen.experiment.task, grid, machine, table)
        _check_table(resume, plan, table)
        batch = _grid_batch(chosen, chosen.experiment, plan, options, jobs)
    elif chosen.trials is not None:
        if resume is not None:
            plan = continued_plan(resume, machine, asked, ("table", "seed"), "trials")
        else:
            plan = new_plan({"table": table, "seed": seed}, machine)
        _check_table(resume, plan, table)
        batch = TrialsBatch(chosen, plan, options)
    else:
        _compute(chosen, seed, options)
        return
    run_batch(batch, options, f"reproduce-{table}", f"gossamer reproduce {table}")


def _check_table(path: Path | None, plan: BatchPlan, table: str) -> None:
    """Refuse to continue a run as another table than its own."""
    found = plan.choices["table"]
    if found != table:
        raise ConfigurationError(
            f"{path} holds {found or 'another run'}, not {table}; name its own table"
        )


def _grid_batch(
    chosen: PublishedTable, experiment: Experiment, setup: BatchPlan, options: BatchOptions,
    jobs: int | None,
) -> GridBatch:  # fmt: skip
    """The batch of a table whose cells are trainings of a laboratory grid."""

    def described(results: GridResults) -> dict[str, Any]:
        cells = [cell.as_dict() for cell in experiment.cells(results)]
        return {"table": chosen.name, "cells": cells}

    def show(_task: Task, results: GridResults, folder: RunFolder | None) -> None:
        cells = experiment.cells(results)
        show_table(chosen, cells)
        say(
            f"this run: {counted(results.grid.epochs, 'epoch')}, "
            f"{counted(len(cells), 'cell')} of {chosen.cells}"
        )
        if folder is not None and results.cells and can_draw():
            experiment.picture(folder.path / "table.png", results)

    return GridBatch(setup, options, jobs, described, show)


def _taken(table: PublishedTable) -> frozenset[str]:
    if table.trainings is not None:
        return _SINGLE
    if table.trials is not None:
        return _TRIALS
    return frozenset() if table.experiment is None else _TRAINED


def _refuse(table: PublishedTable, asked: Mapping[str, object]) -> None:
    options = [o for o, value in asked.items() if value is not None and o not in _taken(table)]
    if options:
        takers = [name for name, one in TABLES.items() if _taken(one).issuperset(options)]
        why = "one fixed grid"
        if table.experiment is None:
            why = "computed at once and without data"
        if table.trials is not None:
            why = "computed without data"
        raise ConfigurationError(
            f"{table.name} is {why}; leave out {', '.join(options)}, "
            f"which {', '.join(takers)} {'takes' if len(takers) == 1 else 'take'}"
        )


def _compute(chosen: PublishedTable, seed: int, options: BatchOptions) -> None:
    """Compute a table that needs no training."""
    assert chosen.compute is not None
    config = {"table": chosen.name, "seed": seed, "settings": chosen.settings}
    with kept_run(options.runs, f"reproduce-{chosen.name}", config) as folder:
        with Reporter(chosen.cells, chosen.name) as reporter:
            cells = chosen.compute(seed, reporter.finished)
        result: dict[str, Any] = {"table": chosen.name, "cells": [cell.as_dict() for cell in cells]}
        show_table(chosen, cells)
        if options.as_json:
            print_json(result)
        if folder is not None:
            folder.write_summary({"ended": "finished", **result})
            if can_draw():
                draw_table(folder, chosen, cells)


def _list(as_json: bool) -> None:
    rows = [(table.name, table.title, table.source) for table in TABLES.values()]
    out.print(titled_table("Published tables", "table", "what it shows", "source", rows=rows))
    if as_json:
        print_json({"tables": [{"name": t.name, "title": t.title} for t in TABLES.values()]})
