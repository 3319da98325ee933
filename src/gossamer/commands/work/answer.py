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

from gossamer.errors import ConfigurationError
from gossamer.files import replace_text
from gossamer.observe.progress import is_watched
from gossamer.report.page.build import build_page
from gossamer.report.page.html_file import page_html
from gossamer.report.pictures.figure import has_matplotlib
from gossamer.report.pictures.main_picture import main_picture
from gossamer.runs.folder import RunFolder
from gossamer.runs.kept_runs import read_folder

_WIDTH = 200


class Answer(ABC):
    """What a Python function of the same name as a command returns."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What the answer is about, in a few words."""

    @abstractmethod
    def table(self) -> list[dict[str, Any]]:
        """One dictionary for each row, for example for `pandas.DataFrame`."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """What the command prints with `--json`."""

    @abstractmethod
    def save(self, path: str | Path) -> Path:
        """Keep what the command would keep; return its path."""

    @abstractmethod
    def _shown(self) -> tuple[Table, list[str]]:
        """A short table, and sentences of which the first is the answer in short."""

    @abstractmethod
    def _draw(self, place: Path) -> bool:
        """Draw the main picture into a new file; False where there is none."""

    def __repr__(self) -> str:
        # In a notebook rich would also display what is captured here, as an empty output.
        console = Console(
            width=_WIDTH, highlight=False, emoji=False, color_system=None, force_jupyter=False
        )
        table, sentences = self._shown()
        # Above a narrow table rich would break the title.
        title, table.title = table.title, None
        with console.capture() as capture:
            console.print(table)
        lines = [line.rstrip() for line in capture.get().splitlines()]
        above = [] if title is None else [str(title)]
        return "\n".join([*above, *(line for line in lines if line), *sentences])

    def _repr_html_(self) -> str:
        """The table and the main picture, as a notebook shows them."""
        table, sentences = self._shown()
        told = [f"<p>{html.escape(sentence)}</p>" for sentence in sentences]
        caption = f"<caption>{html.escape(str(table.title))}</caption>" if table.title else ""
        heads = "".join(f"<th>{html.escape(str(one.header))}</th>" for one in table.columns)
        rows = zip(*(column.cells for column in table.columns), strict=True)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>"
            for row in rows
        )
        return (
            f"{told[0]}<table>{caption}<thead><tr>{heads}</tr></thead>"
            f"<tbody>{body}</tbody></table>{''.join(told[1:])}{self._picture()}"
        )

    def _picture(self) -> str:
        """The main picture as an element of a page; empty where it cannot be drawn."""
        if not has_matplotlib():
            return ""
        with tempfile.TemporaryDirectory(prefix="gossamer-") as name:
            place = Path(name) / "picture.png"
            if not self._draw(place):
                return ""
            data = base64.b64encode(place.read_bytes()).decode()
        return f'<img alt="the main picture" src="data:image/png;base64,{data}">'

    def report(self, path: str | Path) -> Path:
        """Write a page, one file that needs nothing else; return its path."""
        place = Path(path)
        if place.suffix not in (".html", ".htm"):
            raise ConfigurationError(f"a report must end in .html, for it is a page, got {place}")
        if not place.parent.is_dir():
            raise ConfigurationError(f"{place}: the folder {place.parent} does not exist; make it")
        replace_text(place, self._page())
        return place

    def _page(self) -> str:
        title = html.escape(self.title)
        return _PAGE.replace("@@title@@", title).replace("@@body@@", self._repr_html_())


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>@@title@@</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: 0.5rem; color: #666; }
th, td { padding: 0.2rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; margin-top: 1rem; }
</style>
</head>
<body>
<h1>@@title@@</h1>
@@body@@
</body>
</html>
"""


class KeptAnswer(Answer):
    """An answer with the folder of its runs, which lives as long as the answer does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def _draw(self, place: Path) -> bool:
        return main_picture(place, [read_folder(self._folder)])

    def _page(self) -> str:
        return page_html(build_page([read_folder(self._folder)]))

    def save(self, path: str | Path) -> Path:
        """Keep all runs in a new folder, as the command does with `--runs`; return its path."""
        place = new_folder(path)
        shutil.copytree(self._folder, place)
        return place


def new_folder(path: str | Path) -> Path:
    """A folder that is still to be made; one that exists is refused."""
    place = Path(path)
    if place.exists():
        raise ConfigurationError(f"{place} exists; give the name of a new folder")
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
    return is_watched() if asked is None else asked
