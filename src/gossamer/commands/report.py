"""`gossamer report`: page and picture of one run or several; every command keeps them itself."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gossamer.commands.console import err, out
from gossamer.commands.options import target_from
from gossamer.errors import ConfigurationError
from gossamer.report.page.build import build_page
from gossamer.report.page.html_file import write_page
from gossamer.report.pictures.figure import has_matplotlib
from gossamer.report.pictures.main_picture import Advice, has_own_picture, main_picture
from gossamer.runs.folder import RunFolder
from gossamer.runs.kept_runs import Folder, read_folder
from gossamer.runs.statistics import measure


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
        typer.Option(
            "--target",
            help="Accuracy (0.95, or 95 for 95 %) or loss to reach and hold; default: near the "
            "best.",
        ),
    ] = None,
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
    target = target_from(target, has_accuracy=key == "accuracy")
    data = build_page(folders, target=target)
    if out_file is None:
        out_file = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    write_page(out_file, data)
    for line in data["missing"]:
        err.print(f"missing: {line}", markup=False, soft_wrap=True)
    out.print(data["verdict"], markup=False, style="bold", soft_wrap=True)
    out.print(f"report: {out_file}", markup=False, soft_wrap=True)
    picture = draw_beside(out_file, folders, target)
    if picture is not None:
        out.print(f"picture: {picture}", markup=False, soft_wrap=True)


def _check_place(path: Path | None) -> None:
    """Refuse a place that a page does not belong to; only folders of runs are made unasked."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigurationError(f"--out {path} is a folder; name a file such as report.html")
    if path.suffix not in (".html", ".htm"):
        raise ConfigurationError(f"--out must end in .html, for it is a page, got {path}")
    if not path.parent.is_dir():
        raise ConfigurationError(f"--out {path}: the folder {path.parent} does not exist; make it")


def keep_report(folder: RunFolder | None, *, has_failed: bool = False) -> None:
    """report.html and report.png inside the folder of a command that has ended, however it did."""
    if folder is None:
        return
    place = folder.path / "report.html"
    with complete(folder, has_failed=has_failed):
        folders = [read_folder(folder.path)]
        write_page(place, build_page(folders))
        # Standard output is for results.
        (err if has_failed else out).print(f"report: {place}", markup=False, soft_wrap=True)
        draw_beside(place, folders)


@contextmanager
def complete(folder: RunFolder, *, has_failed: bool = False) -> Generator[None]:
    """Around the page, which is made when the result has been told: a folder that is not whole
    ends the command with a sentence, unless something worse ends it already."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if not has_failed:
        folder.check()  # what came first is the cause
        if isinstance(failure, OSError):
            raise failure
    if failure is not None:
        text = f"no report: {failure or type(failure).__name__}"
        err.print(text, markup=False, soft_wrap=True)
        if not has_failed:
            raise typer.Exit(1)


def draw_beside(
    page: Path,
    folders: Sequence[Folder],
    target: float | None = None,
    advice: Advice | None = None,
) -> Path | None:
    """The main picture beside the page, where it can be drawn and is not there yet."""
    path = page.with_suffix(".png")
    if path == page or has_own_picture(folders) or not has_matplotlib():
        return None
    try:
        return path if main_picture(path, folders, target=target, advice=advice) else None
    except OSError:
        raise
    except Exception as error:
        # The page has it all; a picture is not worth losing how the command ended.
        err.print(f"no picture: {error or type(error).__name__}", markup=False, soft_wrap=True)
        return None
