"""What every command does that keeps a run: the folder, its page, and how the command ended."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from gossamer.commands.console import say_line, warn
from gossamer.commands.view.live import live_page
from gossamer.commands.work.simulations import command_line, ended_by
from gossamer.report.page.build import build_page
from gossamer.report.page.html_file import write_page
from gossamer.report.pictures.figure import has_matplotlib
from gossamer.report.pictures.main_picture import main_picture
from gossamer.runs.folder import RunFolder
from gossamer.runs.kept_runs import Folder, read_folder
from gossamer.runs.result import Row


@contextmanager
def kept_run(
    runs: Path,
    name: str,
    config: Row | None = None,
    *,
    resumed: Path | None = None,
    live: int | None = None,
    picture: str = "report.png",
    has_page: bool = True,
) -> Generator[RunFolder | None]:
    """Give the folder that a command keeps its run in, or None where `--runs none` was given.

    An error that ends the command is written into the folder. At the end the command says where the
    folder is, and makes its page and its picture. `--live` shows the page in the meantime.
    """
    is_kept = keeps_folder(runs) or resumed is not None
    with live_page(live, keeps_folder=is_kept) as page:
        folder = None if resumed is None else RunFolder(resumed)
        if folder is None and is_kept:
            folder = RunFolder.create(runs, name)
        if folder is not None and page is not None:
            page.show(folder)
        try:
            if folder is not None and config is not None and resumed is None:
                folder.write_config({**config, "command_line": command_line()})
            yield folder
        except BaseException as error:
            if folder is not None:
                if not folder.has_summary:
                    folder.write_summary({"ended": ended_by(error)})
                warn(f"kept in {folder.path}")
                keep_report(folder, has_failed=True)
            raise
        if folder is not None:
            say_line(f"kept in {folder.path}")
            if has_page:
                keep_report(folder, picture=picture)


def keeps_folder(runs: Path) -> bool:
    """Whether this value of `--runs` asks for a run folder."""
    return str(runs) != "none"


def keep_report(
    folder: RunFolder, *, has_failed: bool = False, picture: str = "report.png"
) -> None:
    """Make the page and the picture in the folder of a command that has ended."""
    place = folder.path / "report.html"
    with complete(folder, has_failed=has_failed):
        folders = [read_folder(folder.path)]
        write_page(place, build_page(folders))
        # Standard output has results only, so a failed command names its page on standard error.
        (warn if has_failed else say_line)(f"report: {place}")
        draw(folder.path / picture, folders)


@contextmanager
def complete(folder: RunFolder, *, has_failed: bool = False) -> Generator[None]:
    """Make a page in this context, after the results were printed.

    A folder that could not be written in full ends the command with one sentence, unless the
    command has failed already.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if not has_failed:
        folder.check()  # the earliest failure is the cause
        if isinstance(failure, OSError):
            raise failure
    if failure is not None:
        warn(f"no report: {failure or type(failure).__name__}")
        if not has_failed:
            raise typer.Exit(1)


def draw(path: Path, folders: Sequence[Folder], target: float | None = None) -> Path | None:
    """Draw the main picture of these folders; return None where it cannot be drawn."""
    if not has_matplotlib():
        return None
    try:
        return path if main_picture(path, folders, target=target) else None
    except OSError:
        raise
    except Exception as error:
        # The page shows the same, so the command goes on without the picture.
        warn(f"no picture: {error or type(error).__name__}")
        return None
