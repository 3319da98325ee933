"""The view of a comparison: a row for each method on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.text import Text

from gossamer.commands.console import (
    err,
    fit,
    is_watched,
    metric_of,
    plain_table,
    progress_line,
    show_share,
    show_stale,
    warn,
)
from gossamer.errors import Error
from gossamer.observe.progress import LiveView
from gossamer.quantities import counted
from gossamer.runs.result import Row


@dataclass
class _Method:
    """What is known of one method so far."""

    runs: int
    done: float = 0.0
    failed: int = 0
    rate: float = 0.0
    began: float = 0.0
    row: Row = field(default_factory=Row)
    speed: float | None = None
    """Steps of all workers per second of real time."""


class Dashboard:
    """Shows the progress of the runs of several methods."""

    def __init__(self, runs: dict[str, int]) -> None:
        """`runs` says how many runs each method has."""
        self._methods = {label: _Method(count) for label, count in runs.items()}
        self._total = sum(runs.values())
        self._finished = 0
        self._running: dict[str, int] = {}
        """How many runs of a method are going on."""
        self._began = time.monotonic()
        self._live = LiveView(self.view)

    def __enter__(self) -> Dashboard:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(*error)

    def expect(self, label: str) -> None:
        """Count one more run of this method that is to come."""
        self._methods[label].runs += 1
        self._total += 1

    def begin(self, label: str, rate: float) -> None:
        """A run of this method at this learning rate has begun."""
        self._running[label] = self._running.get(label, 0) + 1
        self._methods[label].rate = rate
        self._methods[label].began = time.monotonic()

    def at(self, label: str, row: Row, share: float) -> None:
        """Show an evaluation of a run of this method, and how far the run is."""
        method = self._methods[label]
        method.row = row
        method.done = int(method.done) + min(share, 0.999)
        passed = time.monotonic() - method.began
        method.speed = row["steps"] / passed if passed > 0 else None
        self._live.changed()

    def finished(self, label: str, name: str, outcome: Row | Error) -> None:
        """A run of this method is over, with this summary or this error."""
        method = self._methods[label]
        self._running[label] -= 1
        method.done = int(method.done) + 1.0
        has_failed = isinstance(outcome, Error)
        method.failed += has_failed
        self._finished += 1
        self._live.changed()
        if not is_watched():
            what = f"{name} failed: {outcome}" if has_failed else progress_line(name, outcome)
            warn(f"[{self._finished}/{self._total}] {what}")

    def view(self) -> Group:
        """Show all methods, and how long the rest may take."""
        table = plain_table()
        table.add_column("method", no_wrap=True)
        table.add_column("runs")
        score = next((m.row["score"] for m in self._methods.values() if "score" in m.row), None)
        metric = score or "accuracy"
        for column in ("lr", "epoch", "loss", metric, "virtual", "steps/s", "stale", "waiting"):
            table.add_column(column, justify="right", no_wrap=True)
        for label, method in self._methods.items():
            table.add_row(
                Text(label, style="bold" if self._running.get(label) else ""),
                ProgressBar(total=method.runs, completed=method.done, width=12),
                *_cells(method),
                style="" if method.row or self._running.get(label) else "dim",
            )
        fit(table, err)
        return Group(table, Text(self._footer(), style="dim"))

    def _footer(self) -> str:
        passed = time.monotonic() - self._began
        done = sum(method.done for method in self._methods.values())
        left = f", about {passed / done * (self._total - done):.0f} s left" if done > 0.5 else ""
        runs = f"{self._finished} of {counted(self._total, 'run')}"
        return f"{runs}, {passed:.0f} s{left}; Ctrl-C keeps them"


def _cells(method: _Method) -> list[str]:
    row = method.row
    if not row:
        return [""] * 8
    loss = row.get("loss")
    waited, computed = sum(row["waiting_seconds"]), sum(row["computing_seconds"])
    waits = f"{show_share(waited / max(waited + computed, 1e-12))} {row['waits_for'] or ''}"
    metric = metric_of(row)
    return [
        f"{method.rate:g}", f"{row['epochs']:.1f}", "-" if loss is None else f"{loss:.3f}",
        "-" if metric is None else metric[1], f"{row['virtual_seconds']:.2f} s",
        "" if method.speed is None else f"{method.speed:,.0f}",
        show_stale(row), waits if not method.failed else "failed",
    ]  # fmt: skip
