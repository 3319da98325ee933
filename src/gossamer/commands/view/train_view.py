"""The view of a real run: a row for each worker on a terminal, lines elsewhere."""

from __future__ import annotations

from rich.table import Table

from gossamer.commands.console import (
    err,
    fit,
    is_watched,
    progress_line,
    show_share,
    show_stale,
    warn,
)
from gossamer.observe.progress import LiveView
from gossamer.quantities import counted
from gossamer.runs.result import Row


class TrainView:
    """Shows all workers on a terminal, and a line for each evaluation elsewhere."""

    def __init__(self, method: str, workers: int, epochs: float) -> None:
        self._method = method
        self._epochs = epochs
        self._latest: dict[int, Row] = {}
        self._speeds: dict[int, float] = {}
        self._workers = workers
        self._last: Row = {}
        self._live = LiveView(self._table)

    def __enter__(self) -> TrainView:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(*error)

    def start(self) -> None:
        """Say that workers start, because their imports take seconds."""
        if not is_watched():
            warn(f"starting {counted(self._workers, 'worker')}")

    def worker(self, rank: int, row: Row) -> None:
        before = self._latest.get(rank)
        if before is not None and row["seconds"] > before["seconds"]:
            passed = row["seconds"] - before["seconds"]
            self._speeds[rank] = (row["steps"] - before["steps"]) / passed
        self._latest[rank] = row
        self._live.changed()

    def row(self, row: Row) -> None:
        self._last = row
        if not is_watched():
            warn(progress_line(self._method, row))

    def _table(self) -> Table:
        title = progress_line(self._method, self._last) if self._last else self._method
        table = Table(title=title, title_justify="left")
        for column in (
            "worker", "steps", "steps/s", "training loss", "exchanges/step", "stale", "waiting",
            "epoch",
        ):  # fmt: skip
            table.add_column(column, justify="right")
        for rank in range(self._workers):
            row = self._latest.get(rank)
            if row is None:
                table.add_row(str(rank), "starting", *[""] * 6)
                continue
            loss = row["training_loss"]
            table.add_row(
                str(rank), str(row["steps"]), f"{self._speeds.get(rank, 0.0):.0f}",
                "" if loss is None else f"{loss:.3f}",
                f"{row['exchanges'] / max(1, row['steps']):.2f}" if row["exchanges"] else "",
                show_stale(row), _waiting(row),
                f"{row['epochs']:.2f} of {self._epochs:g}",
            )  # fmt: skip
        fit(table, err)
        return table


def _waiting(row: Row) -> str:
    """The share of time that a worker waited, and for what it waited most."""
    share = show_share(row["waiting_seconds"] / max(row["seconds"], 1e-9))
    return share if row["waits_for"] is None else f"{share} {row['waits_for']}"
