"""`gossamer report`: one page of one run or of several; every command keeps one in its folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from gossamer.commands.console import err, out
from gossamer.errors import ConfigurationError
from gossamer.report.build import report_data
from gossamer.report.folder import RunFolder
from gossamer.report.page import write_page


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs or comparisons of one task."),
    ],
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Where the page goes; default: report.html in the folder, of several here.",
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option("--target", help="Accuracy (or loss) to reach; default: near the best."),
    ] = None,
) -> None:
    """Make the page of one run, or of several beside each other.

    \b
    gossamer report runs/20260101-120000-compare-digits-mlp
    gossamer report runs/*-simulate-* --out methods.html

    Runs that differ by their seed only are repetitions of one method. What is damaged or missing
    in a folder is named on the page.
    """
    if target is not None and not math.isfinite(target):
        raise ConfigurationError(f"target must be a finite number, got {target}")
    if out_file is not None and out_file.is_dir():
        raise ConfigurationError(f"--out {out_file} is a folder; name a file such as report.html")
    data = report_data(runs, target=target)
    if out_file is None:
        out_file = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    write_page(out_file, data)
    for line in data["missing"]:
        err.print(f"missing: {line}", markup=False, soft_wrap=True)
    out.print(data["verdict"], markup=False, style="bold", soft_wrap=True)
    out.print(f"report: {out_file}", markup=False, soft_wrap=True)


def keep_report(folder: RunFolder | None, *, has_failed: bool = False) -> None:
    """report.html inside the folder of a command that has ended, however it did."""
    if folder is None:
        return
    place = folder.path / "report.html"
    try:
        write_page(place, report_data([folder.path]))
    except Exception as error:
        # All figures are on disk already; a page is not worth losing how the command ended.
        err.print(f"no report: {error or type(error).__name__}", markup=False, soft_wrap=True)
        return
    # Standard output is for results.
    (err if has_failed else out).print(f"report: {place}", markup=False, soft_wrap=True)
