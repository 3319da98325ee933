"""Who waits for whom: each worker answers SIGUSR1, and the launcher shows a table.

A worker (`explain_on_signal`) writes its answer as RANK.json into the launcher's folder. The
launcher (`Explanation`) asks all workers and shows their answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from gossamer.files import replace_text

if TYPE_CHECKING:
    from gossamer.real.launch.process import Process

_PATIENCE_S = 2.0

Explain = Callable[[], list[dict[str, Any]]]


class _Speaker:
    """The handler of one run. Afterwards it calls the handler that the program had before."""

    def __init__(self, rank: int, explain: Explain) -> None:
        self._rank = rank
        self.explain = explain
        before = signal.getsignal(signal.SIGUSR1)
        self.before = before.before if isinstance(before, _Speaker) else before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # A full disk must not end a worker that was only asked what it waits for.
        with contextlib.suppress(OSError):
            self._say()
        if callable(self.before):
            self.before(number, frame)

    def _say(self) -> None:
        waiting = self.explain()
        folder = os.environ.get("GOSSAMER_EXPLAIN_DIR")
        if folder is None:
            said = {"worker": self._rank, "waiting": waiting}
            print(json.dumps(said), file=sys.stderr, flush=True)
            return
        # In one step, because the launcher may be reading already.
        replace_text(Path(folder) / f"{self._rank}.json", json.dumps(waiting))


def explain_on_signal(rank: int, explain: Explain) -> None:
    """Answer SIGUSR1 from now on: into the launcher's folder if there is one, else on stderr."""
    if threading.current_thread() is threading.main_thread():  # others cannot set handlers
        signal.signal(signal.SIGUSR1, _Speaker(rank, explain))


def explain_no_more() -> None:
    """Set the program's own handler again, if it had one. Otherwise ours stays, as the signal would
    end the program without a handler, and a launcher may still send it."""
    if threading.current_thread() is not threading.main_thread():
        return
    present = signal.getsignal(signal.SIGUSR1)
    if not isinstance(present, _Speaker):
        return
    present.explain = lambda: [{"task": "main", "waits_for": "nothing: it has left its loop"}]
    if callable(present.before):
        signal.signal(signal.SIGUSR1, present.before)


class Explanation:
    """One question to all workers, and their answers as a table."""

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
        """Whether all workers have answered, or the time for answers is over."""
        if time.monotonic() > self._until:
            return True
        return all(
            process.ended is not None
            or process.rank not in self._asked
            or self._answer(process.rank) is not None
            for process in self._processes
        )

    def show(self) -> None:
        # Imported here, because workers import this module and print no tables.
        from rich.console import Console
        from rich.table import Table

        table = Table(title="Who waits for what", title_justify="left")
        for column in ("worker", "task", "waits for", "peer", "since"):
            table.add_column(column)
        for process in self._processes:
            for row in self._rows(process):
                table.add_row(f"{process.rank}", *row)
        Console(stderr=True, highlight=False, emoji=False).print(table)

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
            return None  # the answer is not there yet, or it is incomplete
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
