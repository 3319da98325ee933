"""What the commands say while they work: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from gossamer.quantities import show_bytes as show_bytes
from gossamer.report.pictures.figure import has_matplotlib
from gossamer.runs.folder import to_json

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
if not out.is_terminal:
    # A file or a pipe has no width of its own; tables need a little more than 80 columns.
    out = Console(highlight=False, width=110)


class Reporter:
    """Progress of several runs; a notice per run where nobody watches a terminal."""

    def __init__(self, total: int, what: str, *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        """Whether nothing is said where there is no terminal."""
        self._total = total
        self._what = what
        self._done = 0
        self._progress: Progress | None = None
        self._bar: TaskID | None = None
        if err.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=err,
                transient=True,
            )

    def __enter__(self) -> Reporter:
        if self._progress is not None:
            self._progress.start()
            self._bar = self._progress.add_task(self._what, total=self._total)
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def at(self, what: str, share: float) -> None:
        """Inside a run: how far it is."""
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, description=what, completed=self._done + share)

    def finished(self, what: str) -> None:
        """One run is over."""
        self._done += 1
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=self._done)
        elif not self._is_quiet:
            warn(f"[{self._done}/{self._total}] {what}")


def say(text: str, style: str | None = None) -> None:
    """A sentence: broken between words on a terminal, one line in a file or a pipe."""
    out.print(text, markup=False, soft_wrap=not out.is_terminal, style=style)


def say_line(text: str, style: str | None = None) -> None:
    """A line that is never broken, because it holds something to copy, such as a path."""
    out.print(text, markup=False, soft_wrap=True, style=style)


def warn(text: str) -> None:
    """A line on standard error, for what is not a result."""
    err.print(text, markup=False, soft_wrap=True)


def plain_table(title: str | None = None, *, gap: int = 1) -> Table:
    """A table with one line below its header, and so many spaces between its columns."""
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False
    )


def show_table(table: Table) -> None:
    """A table that fits: on a narrow terminal without its last columns, which are named."""
    if not out.is_terminal:
        # A file is as wide as it must be.
        usual, out.width = out.width, max(out.width, _hold(table, out))
        out.print(table)
        out.width = usual
        return
    left_out = fit(table, out)
    out.print(table)
    if left_out:
        say(f"left out for want of room: {', '.join(left_out)}; make the terminal wider")


def fit(table: Table, console: Console) -> list[str]:
    """Take columns off the right until the rest fits; returns their names.

    Nothing that holds no spaces is ever cut: half a method's name is nobody's.
    """
    left_out: list[str] = []
    while len(table.columns) > 2 and _hold(table, console) > console.width:
        left_out.insert(0, str(table.columns.pop().header))
    return left_out


def _hold(table: Table, console: Console) -> int:
    """Let no column be narrower than its longest word, or line where it is not to be broken.

    Returns how wide the table then is at least.
    """
    most: list[int] = []
    for column in table.columns:
        cells = [console.measure(cell) for cell in (column.header, *column.cells)]
        most.append(max(cell.maximum for cell in cells))
        least = max(cell.minimum for cell in cells)
        column.min_width = most[-1] if column.no_wrap else least
    wide = console.options.update(width=sum(most) + 20 * len(most))
    around = console.measure(table, options=wide).maximum - sum(most)
    return around + sum(column.min_width or 0 for column in table.columns)


def results_elsewhere(as_json: bool) -> bool:
    """With --json all tables and sentences go to standard error, as the callback of that option."""
    out.stderr = as_json
    return as_json


def print_json(value: dict[str, Any]) -> None:
    """One JSON object: with --json, all that is on standard output."""
    line = to_json(value) + "\n"
    raw = getattr(sys.stdout, "buffer", None)
    if not isinstance(raw, io.RawIOBase):
        sys.stdout.write(line)
        sys.stdout.flush()
        return
    # Under `python -u` nothing lies between the text and the pipe, and what does not fit into the
    # pipe at once would be dropped without a word.
    left = memoryview(line.encode())
    while left:
        left = left[raw.write(left) or 0 :]


def command_line() -> str:
    """What was typed, as config.json keeps it: a shell reads it back as it was."""
    return shlex.join(["gossamer", *sys.argv[1:]])


def can_draw() -> bool:
    """Whether pictures can be made; the tables are complete without them."""
    found = has_matplotlib()
    if not found:
        warn("no picture: run `pip install matplotlib` to get one")
    return found


def show_share(value: float | None) -> str:
    return "-" if value is None or value != value else f"{100 * value:.1f} %"


def metric_of(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The name of the metric that a row has, and its value in words; None: it has a loss alone."""
    name = row.get("score")
    if name is not None and row.get(name) is not None:
        return name, f"{row[name]:.4g}"
    return None if row.get("accuracy") is None else ("accuracy", show_share(row["accuracy"]))


def show_stale(row: Mapping[str, Any]) -> str:
    """Updates that gradients missed; in brackets those of all workers; nothing where there is
    nothing to measure."""
    own, everyone = row.get("mean_staleness"), row.get("mean_global_staleness")
    shown = "" if own is None else f"{own:.1f}"
    return shown if everyone is None else f"{shown} ({everyone:.1f})"
