"""On SIGUSR1 a worker says what it waits for, from whom, since when."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

Explain = Callable[[], list[dict[str, Any]]]


def explain_on_signal(rank: int, explain: Explain) -> None:
    """Into the launcher's folder where there is one, else to the worker's own error output."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may ask for signals

    def say(number: int, frame: FrameType | None) -> None:
        waiting = explain()
        folder = os.environ.get("GOSSAMER_EXPLAIN_DIR")
        if folder is None:
            print(json.dumps({"worker": rank, "waiting": waiting}), file=sys.stderr, flush=True)
            return
        # Whole or not at all: the launcher may be reading already.
        part = Path(folder) / f".{rank}.part"
        part.write_text(json.dumps(waiting), encoding="utf-8")
        part.replace(Path(folder) / f"{rank}.json")

    signal.signal(signal.SIGUSR1, say)
