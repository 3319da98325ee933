"""What the commands say while they work: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import shlex
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from gossamer.report.figures import has_matplotlib
from gossamer.report.folder import to_json
from gossamer.report.units import show_bytes as show_bytes

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
            err.print(f"[{self._done}/{self._total}] {what}", markup=False, soft_wrap=True)


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
        err.print("no picture: pip install 'gossamer[plot]' to get one", markup=False)
    return found


def show_share(value: float | None) -> str:
    return "-" if value is None or value != value else f"{100 * value:.1f} %"


def show_stale(row: Mapping[str, Any]) -> str:
    """Updates that gradients missed; in brackets those of all workers; nothing where there is
    nothing to measure."""
    own, everyone = row.get("mean_staleness"), row.get("mean_global_staleness")
    shown = "" if own is None else f"{own:.1f}"
    return shown if everyone is None else f"{shown} ({everyone:.1f})"
