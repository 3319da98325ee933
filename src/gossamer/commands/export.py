"""`gossamer export`: write kept runs such that other programs can read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gossamer.commands.console import say_line, warn
from gossamer.commands.options import shown
from gossamer.errors import ConfigurationError, unknown_name
from gossamer.quantities import counted
from gossamer.report.exporters import (
    CsvExporter,
    Exporter,
    MlflowExporter,
    ParquetExporter,
    TensorBoardExporter,
    WandbExporter,
)
from gossamer.report.exporters.wandb import keep_inside
from gossamer.runs.kept_runs import Folder, Run, read_folder


def export(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or comparisons.")
    ],
    to: Annotated[str, shown("csv, parquet, tensorboard, wandb or mlflow.")] = "csv",
    out_folder: Annotated[
        Path | None,
        shown(
            "Where all of it goes; default: export/FORMAT inside each run's folder.",
            "--out",
            metavar="FOLDER",
        ),
    ] = None,
    force: Annotated[
        bool, shown("Replace what an earlier export has left there.", "--force")
    ] = False,
) -> None:
    """Write kept runs as tables, or for TensorBoard and others.

    \b
    gossamer export runs/20260101-120000-compare-digits-mlp
    gossamer export runs/* --to tensorboard --out events

    Tables are metrics, a row per evaluation, and summary, a row per run. What is damaged or
    missing in a folder is named and left out.
    """
    if to not in _TARGETS:
        raise unknown_name("format", to, _TARGETS)
    folders = [read_folder(path) for path in runs]
    for folder in folders:
        for line in folder.missing:
            warn(f"missing: {line}")
    if out_folder is None:
        for folder in folders:
            _export(_named([folder]), to, folder.path / "export" / to, force=force)
    else:
        _export(_named(folders), to, out_folder, force=force)


def _named(folders: list[Folder]) -> dict[str, Run]:
    """Give every run a name of its own, from the names of its folders."""
    named: dict[str, Run] = {}
    for folder in folders:
        where = folder.path.resolve().name
        is_lone = len(folder.runs) == 1 and folder.runs[0].name == where
        for run in folder.runs:
            name = wanted = where if is_lone else f"{where}/{run.name}"
            again = 1
            while name in named:
                again += 1
                name = f"{wanted}-{again}"
            named[name] = run
    if not named:
        places = ", ".join(str(folder.path) for folder in folders)
        raise ConfigurationError(
            f"{places} holds no run to export; give folders of simulate, train or compare"
        )
    return named


def _export(named: dict[str, Run], to: str, place: Path, *, force: bool) -> None:
    with _TARGETS[to](place, force) as exporter:
        for name, run in named.items():
            exporter.export(run, name)
    say_line(f"exported {counted(len(named), 'run')}: {place}")


def _to_wandb(place: Path, force: bool) -> Exporter:
    keep_inside(place)
    return WandbExporter(folder=place, force=force)


_TARGETS: dict[str, Callable[[Path, bool], Exporter]] = {
    "csv": lambda place, force: CsvExporter(place, force=force),
    "parquet": lambda place, force: ParquetExporter(place, force=force),
    "tensorboard": lambda place, force: TensorBoardExporter(place, force=force),
    "wandb": _to_wandb,
    "mlflow": lambda place, force: MlflowExporter(folder=place, force=force),
}
