"""What is shown while a user waits: in place on a terminal and in a notebook, by lines elsewhere.

All of it goes to standard error, because standard output belongs to results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.jupyter import JupyterMixin
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

err = Console(stderr=True, highlight=False, emoji=False)
_REFRESHES_PER_SECOND = 4


def is_watched() -> bool:
    """Whether somebody watches: on a terminal or in a notebook a view can change in place."""
    return err.is_terminal or err.is_jupyter


def warn(text: str) -> None:
    """Print a line that is no result on standard error."""
    # A notebook cuts a long line off, and a terminal or a file does not.
    err.print(text, markup=False, soft_wrap=not err.is_jupyter)


class LiveView:
    """Shows what `make` returns, again and again in the same place; nothing where nobody watches.

    A terminal forgets it in the end; in a notebook its last state remains below the cell. rich
    alone would need ipywidgets there, which most notebooks have not.
    """

    def __init__(self, make: Callable[[], RenderableType]) -> None:
        self._make = make
        self._terminal: Live | None = None
        self._notebook: Any = None
        self._next = 0.0

    def __enter__(self) -> LiveView:
        if err.is_jupyter:
            self._notebook = _display(_Shown(self._make()))
        elif err.is_terminal:
            self._terminal = Live(
                console=err, get_renderable=self._make, transient=True,
                refresh_per_second=_REFRESHES_PER_SECOND,
            )  # fmt: skip
            self._terminal.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._terminal is not None:
            self._terminal.stop()
        self._next = 0.0
        self.changed()

    def changed(self) -> None:
        """Say that there is something new. A terminal looks by itself, a notebook is told."""
        if self._notebook is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + 1.0 / _REFRESHES_PER_SECOND
            self._notebook.update(_Shown(self._make()))


class _Shown(JupyterMixin):
    """Anything that rich can print, as the output of a cell."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich__(self) -> RenderableType:
        return self._shown


def _display(shown: JupyterMixin) -> Any:
    """Show it below the running cell, and return what can replace it there."""
    from importlib import import_module

    return import_module("IPython.display").display(shown, display_id=True)


class Reporter:
    """Shows the progress of several runs: a bar where somebody watches, elsewhere a line for each
    run."""

    def __init__(self, total: int, what: str, *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        """Whether nothing is printed where nobody watches."""
        self._total = total
        self._done = 0
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=err, auto_refresh=False,
        )  # fmt: skip
        self._bar = self._progress.add_task(what, total=total)
        self._view = LiveView(self._progress.get_renderable)

    def __enter__(self) -> Reporter:
        self._view.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        # What a notebook keeps below the cell: a search often ends before all that it might run.
        self._progress.update(self._bar, total=self._done, completed=self._done)
        self._view.__exit__(*error)

    def at(self, what: str, share: float) -> None:
        """Show how far the present run is."""
        self._progress.update(self._bar, description=what, completed=self._done + share)
        self._view.changed()

    def finished(self, what: str, count: int = 1) -> None:
        """Count one more run as finished, or so many."""
        self._done += count
        self._progress.update(self._bar, completed=self._done)
        self._view.changed()
        if not is_watched() and not self._is_quiet:
            warn(f"[{self._done}/{self._total}] {what}")


def progress_line(what: str, row: Mapping[str, Any]) -> str:
    """Where a run is, in a few words."""
    is_real = "virtual_seconds" not in row
    seconds = row["seconds"] if is_real else row["virtual_seconds"]
    parts = [what, f"epoch {row['epochs']:.1f}", f"{seconds:.2f} {'s' if is_real else 'virtual s'}"]
    if row.get("loss") is not None:
        parts.append(f"loss {row['loss']:.3f}")
    if (metric := metric_of(row)) is not None:
        parts.append(" ".join(metric))
    return "  ".join(parts)


def metric_of(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The name of the metric that a row has, and its value in words; None: it has a loss alone."""
    name = row.get("score")
    if name is not None and row.get(name) is not None:
        return name, f"{row[name]:.4g}"
    return None if row.get("accuracy") is None else ("accuracy", show_share(row["accuracy"]))


def show_share(value: float | None) -> str:
    return "-" if value is None or value != value else f"{100 * value:.1f} %"
