"""What every answer of the Python functions has: a table, a page, a folder, a notebook's view."""

from __future__ import annotations

import base64
import html
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gossamer.commands.console import err
from gossamer.errors import ConfigurationError
from gossamer.report.page.build import build_page
from gossamer.report.page.html_file import write_page
from gossamer.report.pictures.figure import has_matplotlib
from gossamer.report.pictures.main_picture import main_picture
from gossamer.runs.folder import RunFolder
from gossamer.runs.kept_runs import read_folder

_WIDTH = 200


class KeptResult(ABC):
    """An answer with the folder of its runs, which lives as long as the answer does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    @abstractmethod
    def table(self) -> list[dict[str, Any]]:
        """One dictionary for each row, for example for `pandas.DataFrame`."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """What the command prints with `--json`."""

    @abstractmethod
    def _shown(self) -> tuple[Table, str]:
        """A short table and one sentence."""

    def __repr__(self) -> str:
        console = Console(width=_WIDTH, highlight=False, color_system=None)
        table, sentence = self._shown()
        with console.capture() as capture:
            console.print(table)
        lines = [line.rstrip() for line in capture.get().splitlines()]
        return "\n".join([*(line for line in lines if line), sentence])

    def _repr_html_(self) -> str:
        """The table and the main picture, as a notebook shows them."""
        table, sentence = self._shown()
        heads = "".join(f"<th>{html.escape(str(one.header))}</th>" for one in table.columns)
        rows = zip(*(column.cells for column in table.columns), strict=True)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>"
            for row in rows
        )
        return (
            f"<p>{html.escape(sentence)}</p><table><thead><tr>{heads}</tr></thead>"
            f"<tbody>{body}</tbody></table>{self._picture()}"
        )

    def _picture(self) -> str:
        """The main picture as an element of a page; empty where it cannot be drawn."""
        place = self._folder / "comparison.png"
        if not has_matplotlib() or not main_picture(place, [read_folder(self._folder)]):
            return ""
        data = base64.b64encode(place.read_bytes()).decode()
        return f'<img alt="the main picture" src="data:image/png;base64,{data}">'

    def report(self, path: str | Path) -> Path:
        """Write the page of the runs, one file that needs nothing else; return its path."""
        place = Path(path)
        if place.suffix not in (".html", ".htm"):
            raise ConfigurationError(f"a report must end in .html, for it is a page, got {place}")
        if not place.parent.is_dir():
            raise ConfigurationError(f"{place}: the folder {place.parent} does not exist; make it")
        write_page(place, build_page([read_folder(self._folder)]))
        return place

    def save(self, folder: str | Path) -> Path:
        """Keep all runs in a new folder, as the command does with `--runs`; return its path."""
        place = Path(folder)
        if place.exists():
            raise ConfigurationError(f"{place} exists; give the name of a new folder")
        shutil.copytree(self._folder, place)
        return place


@contextmanager
def scratch_folder() -> Generator[RunFolder]:
    """Give a folder for the runs of an answer, which is removed where there is no answer."""
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="gossamer-")))
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise


def shows_progress(asked: bool | None) -> bool:
    """Whether to show progress: as asked, or on a terminal and in a notebook."""
    return (err.is_terminal or err.is_jupyter) if asked is None else asked
