"""How commands print: progress, sentences, tables and JSON."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gossamer.observe.progress import Reporter as Reporter
from gossamer.observe.progress import err as err
from gossamer.observe.progress import is_watched as is_watched
from gossamer.observe.progress import metric_of as metric_of
from gossamer.observe.progress import progress_line as progress_line
from gossamer.observe.progress import show_share as show_share
from gossamer.observe.progress import warn as warn
from gossamer.quantities import show_bytes as show_bytes
from gossamer.report.pictures.figure import has_matplotlib
from gossamer.runs.folder import to_json

out = Console(highlight=False, emoji=False)
if not out.is_terminal:
    # A file or a pipe has no width; tables need a little more than 80 columns.
    out = Console(highlight=False, emoji=False, width=110)


def say(text: str, style: str | None = None) -> None:
    """Print a sentence: a terminal breaks it between words, a file or a pipe gets one line."""
    out.print(text, markup=False, soft_wrap=not out.is_terminal, style=style)


def say_line(text: str, style: str | None = None) -> None:
    """Print a line that is never broken, because it holds something to copy, such as a path."""
    out.print(text, markup=False, soft_wrap=True, style=style)


def plain_table(title: str | None = None, *, gap: int = 1) -> Table:
    """Make a table with one line below its header and `gap` spaces between its columns."""
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False
    )


def add_columns(table: Table, first: str, *others: str, no_wrap: bool = False) -> None:
    """Give a table a first column of names and further columns of numbers."""
    table.add_column(first, no_wrap=no_wrap)
    for column in others:
        table.add_column(column, justify="right", no_wrap=no_wrap)


def titled_table(title: str, *columns: str, rows: Iterable[Sequence[str]] = ()) -> Table:
    """Make a table with a title and a frame; the cells of its first column are not broken."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0], overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def show_table(table: Table) -> None:
    """Print a table. On a narrow terminal the last columns are left out, and named below it."""
    if not out.is_terminal:
        # A file can be as wide as the table.
        usual, out.width = out.width, max(out.width, _hold(table, out))
        out.print(table)
        out.width = usual
        return
    left_out = fit(table, out)
    out.print(table)
    if left_out:
        say(f"left out for want of room: {', '.join(left_out)}; make the terminal wider")


def fit(table: Table, console: Console) -> list[str]:
    """Take columns off the right until the rest fits; return the names of those columns.

    A word is never cut, because half of a method's name names no method.
    """
    left_out: list[str] = []
    while len(table.columns) > 2 and _hold(table, console) > console.width:
        left_out.insert(0, str(table.columns.pop().header))
    return left_out


def _hold(table: Table, console: Console) -> int:
    """Let no column be narrower than its longest word, or its longest line if it may not wrap.

    Return the least width of the table.
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


_results: list[TextIO] = []
"""Standard output, while everything but the JSON goes to standard error."""


def results_elsewhere(as_json: bool) -> bool:
    """Where `--json` is given, send all but the one object to standard error: tables, sentences and
    what a model of the user's prints, here or in a process that is started; typer calls this."""
    out.stderr = as_json
    if not as_json:
        _results.clear()
    elif sys.stdout is not sys.stderr:
        place = sys.stdout
        if place is sys.__stdout__:  # else this process itself is listening
            place = os.fdopen(os.dup(1), "w", encoding="utf-8")
            os.dup2(2, 1)
        _results[:] = [place]
        sys.stdout = sys.stderr
    return as_json


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object, which is all that `--json` prints on standard output."""
    place = _results[0] if _results else sys.stdout
    place.write(to_json(value) + "\n")
    place.flush()


def can_draw() -> bool:
    """Whether pictures can be drawn. A hint is printed where matplotlib is missing."""
    found = has_matplotlib()
    if not found:
        warn("no picture: run `pip install matplotlib` to get one")
    return found


Figures = Sequence[tuple[str, str, Callable[[Any], str]]]
"""What to print of a summary: a label, the key of the figure, and how the figure is written."""


def show_figures(title: str, summary: Mapping[str, Any], figures: Figures) -> None:
    """Print the figures that a summary has, with their intervals where it has some."""
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    bounds = summary.get("interval", {})
    for label, key, show in figures:
        if summary.get(key) is not None:
            between = "" if key not in bounds else " to ".join(map(show, bounds[key]))
            table.add_row(label, show(summary[key]), between)
    out.print(table)


def shared_figures(summary: Mapping[str, Any]) -> tuple[Figures, Figures]:
    """The figures that simulated and real runs both have: first the scores, then the costs."""
    output, own = summary.get("output", "model"), summary.get("score")
    return (
        (f"loss of the {output}", "loss", "{:.4f}".format),
        (f"accuracy of the {output}", "accuracy", show_share),
        ("accuracy of a worker", "worker_accuracy", show_share),
        (f"{own} of the {output}", str(own), "{:.4g}".format),
        (f"{own} of a worker", f"worker_{own}", "{:.4g}".format),
    ), (
        ("waiting", "waiting_fraction", show_share),
        ("shares of the batch", "batch_share", _show_shares),
        ("mean staleness", "mean_staleness", "{:.2f}".format),
        ("mean global staleness", "mean_global_staleness", "{:.2f}".format),
        ("consensus distance", "consensus_distance", "{:.4f}".format),
        ("noise scale", "noise_scale", "{:.3g} samples".format),
        ("times fewer bytes", "compression_ratio", "{:.1f}".format),
        ("encoding, a step", "coding_seconds_per_step", "{:.2g} s".format),
        ("norm not sent yet", "residual_norm", "{:.3g}".format),
        ("bubbles of pipelines", "bubble_fraction", show_share),
        ("stages hold", "pipeline", _show_stages),
        ("cosine of workers", "displacement_cosine", "{:.2f}".format),
    )


def _show_stages(stages: Sequence[Mapping[str, Any]]) -> str:
    """What each stage of a pipeline holds, one in a line."""
    return "\n".join(
        f"{one['parameters']:,} parameters x {one['weight_versions']}"
        + (
            f", {show_bytes(one['activation_bytes'])} of activations"
            if "activation_bytes" in one  # real workers do not count them
            else ""
        )
        for one in stages
    )


_MOST_SHARES = 8


def _show_shares(shares: Sequence[float]) -> str:
    """Each worker's share in order of rank, or of many the least and the largest."""
    if len(shares) > _MOST_SHARES:
        return f"{show_share(min(shares))} to {show_share(max(shares))}"
    return ", ".join(map(show_share, shares))


def show_stale(row: Mapping[str, Any]) -> str:
    """Write the mean staleness of a row, and in brackets the staleness among all workers.

    The text is empty where staleness was not measured.
    """
    own, everyone = row.get("mean_staleness"), row.get("mean_global_staleness")
    shown = "" if own is None else f"{own:.1f}"
    return shown if everyone is None else f"{shown} ({everyone:.1f})"


_LOOK_AGAIN = 0.1


@contextlib.contextmanager
def shown_while_it_grows(file: Path) -> Generator[None]:
    """Inside, what is written to this file goes to standard error, too."""
    is_over = threading.Event()

    def follow() -> None:
        at = 0
        while True:
            was_over = is_over.wait(_LOOK_AGAIN)
            with contextlib.suppress(OSError), file.open("rb") as lines:
                lines.seek(at)
                while part := lines.read(1 << 16):
                    at += len(part)
                    sys.stderr.write(part.decode(errors="replace"))
                sys.stderr.flush()
            if was_over:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
