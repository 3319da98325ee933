"""On SIGUSR1 a worker says what it waits for, from whom, since when."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from gossamer.files import replace_text

Explain = Callable[[], list[dict[str, Any]]]


class _Speaker:
    """The handler of one run. One that the program had before is called behind it."""

    def __init__(self, rank: int, explain: Explain) -> None:
        self._rank = rank
        self.explain = explain
        before = signal.getsignal(signal.SIGUSR1)
        self.before = before.before if isinstance(before, _Speaker) else before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # A full disk must not end a worker that was only asked a question.
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
        # Whole or not at all: the launcher may be reading already.
        replace_text(Path(folder) / f"{self._rank}.json", json.dumps(waiting))


def explain_on_signal(rank: int, explain: Explain) -> None:
    """Into the launcher's folder where there is one, else to the worker's own error output."""
    if threading.current_thread() is threading.main_thread():  # no other may ask for signals
        signal.signal(signal.SIGUSR1, _Speaker(rank, explain))


def explain_no_more() -> None:
    """The program's own handler again, if it had one. Without one the signal would end it, and a
    launcher may still send it."""
    if threading.current_thread() is not threading.main_thread():
        return
    present = signal.getsignal(signal.SIGUSR1)
    if not isinstance(present, _Speaker):
        return
    present.explain = lambda: [{"task": "main", "waits_for": "nothing: it has left its loop"}]
    if callable(present.before):
        signal.signal(signal.SIGUSR1, present.before)
