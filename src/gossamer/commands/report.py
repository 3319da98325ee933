"""`gossamer report`: make the page and the picture of one run or several again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gossamer.commands.console import say_line, warn
from gossamer.commands.kept_run import draw
from gossamer.commands.options import TargetOption, shown
from gossamer.errors import ConfigurationError
from gossamer.report.page.build import build_page
from gossamer.report.page.html_file import write_page
from gossamer.report.pictures.main_picture import has_own_picture
from gossamer.runs.arrival import target_of
from gossamer.runs.kept_runs import read_folder
from gossamer.runs.statistics import measure


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs or comparisons of one task."),
    ],
    out_file: Annotated[
        Path | None,
        shown(
            "Where the page goes; default: report.html in the folder, of several here.",
            "--out",
            metavar="FILE",
        ),
    ] = None,
    target: TargetOption = None,
) -> None:
    """Make the page of one run, or of several beside each other.

    \b
    gossamer report runs/20260101-120000-compare-digits-mlp
    gossamer report runs/*-simulate-* --out methods.html

    Runs that differ by their seed only are repetitions of one method. What is damaged or missing
    in a folder is named on the page. Its first charts are also drawn as a PNG beside it.
    """
    _check_place(out_file)
    folders = [read_folder(path) for path in runs]
    for folder in folders:
        if not (folder.runs or folder.config or folder.summary):
            raise ConfigurationError(
                f"{folder.path} holds no run: it has no config.json, no metrics.jsonl and no "
                "summary.json; give the folder of a run, as in runs/"
            )
    key = measure([run.history for folder in folders for run in folder.runs])
    target = target_of(target, score=key)
    data = build_page(folders, target=target)
    if out_file is None:
        out_file = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    write_page(out_file, data)
    for line in data["missing"]:
        warn(f"missing: {line}")
    say_line(data["verdict"], style="bold")
    say_line(f"report: {out_file}")
    picture = (
        None if has_own_picture(folders) else draw(out_file.with_suffix(".png"), folders, target)
    )
    if picture is not None:
        say_line(f"picture: {picture}")


def _check_place(path: Path | None) -> None:
    """Refuse a path that is no page, or whose folder does not exist."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigurationError(f"--out {path} is a folder; name a file such as report.html")
    if path.suffix not in (".html", ".htm"):
        raise ConfigurationError(f"--out must end in .html, for it is a page, got {path}")
    if not path.parent.is_dir():
        raise ConfigurationError(f"--out {path}: the folder {path.parent} does not exist; make it")
