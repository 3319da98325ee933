"""Who waits for whom: the workers' own answers to SIGUSR1, as one table."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from gossamer.real.launch.process import Process

_PATIENCE_S = 2.0


class Explanation:
    """One question to all workers; they answer by writing RANK.json into a folder."""

    def __init__(self, processes: Sequence[Process], folder: Path) -> None:
        self._processes = processes
        self._folder = folder
        self._until = time.monotonic() + _PATIENCE_S
        self._asked: set[int] = set()
        for process in processes:
            (folder / f"{process.rank}.json").unlink(missing_ok=True)
            if process.tell(signal.SIGUSR1):
                self._asked.add(process.rank)

    @property
    def is_over(self) -> bool:
        """Whether all have answered or have had their time."""
        if time.monotonic() > self._until:
            return True
        return all(
            process.ended is not None
            or process.rank not in self._asked
            or self._answer(process.rank) is not None
            for process in self._processes
        )

    def show(self, console: Console) -> None:
        table = Table(title="Who waits for what", title_justify="left")
        for column in ("worker", "task", "waits for", "peer", "since"):
            table.add_column(column)
        for process in self._processes:
            for row in self._rows(process):
                table.add_row(f"{process.rank}", *row)
        console.print(table)

    def _rows(self, process: Process) -> list[tuple[str, str, str, str]]:
        if process.ended is not None:
            return [("", f"nothing: {process.ended.how}", "", "")]
        if process.rank not in self._asked:
            return [("", "does not say: it has not joined, or does not use gossamer", "", "")]
        answer = self._answer(process.rank)
        if answer is None:
            return [("", "does not answer: busy outside of Python, or paused", "", "")]
        return [_row(wait) for wait in answer] or [("", "nothing: it computes", "", "")]

    def _answer(self, rank: int) -> list[Mapping[str, Any]] | None:
        try:
            said = json.loads((self._folder / f"{rank}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # Not there yet, or half of it.
            return None
        if not isinstance(said, list):
            return []
        return [cast(Mapping[str, Any], wait) for wait in said if isinstance(wait, dict)]


def _row(wait: Mapping[str, Any]) -> tuple[str, str, str, str]:
    peer, since = wait.get("peer"), wait.get("since_seconds")
    return (
        str(wait.get("task", "")),
        str(wait.get("waits_for", "")),
        "" if peer is None else str(peer),
        f"{since:.1f} s" if isinstance(since, int | float) else "",
    )
