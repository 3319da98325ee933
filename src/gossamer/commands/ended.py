"""A command that is ended by a signal tidies up first: nothing temporary stays behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def ended_by_signals() -> Generator[None]:
    """Inside, they end the program as an error would; whoever launches workers handles them by
    itself. What is ignored, as by nohup, stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = [number for number, handler in before.items() if handler == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # asked twice, it means: at once
    raise SystemExit(128 + number)
