"""Ctrl-C in virtual time: between two events, where no coroutine and no line is half made."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from gossamer.sim.kernel import Kernel


@contextmanager
def interrupted_between_events(kernel: Kernel) -> Generator[None]:
    """The first Ctrl-C waits for the event at hand, a second one does not.

    Who handles the signal in a way of their own, or runs this in a thread, keeps their way.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours:
        yield
        return

    def asked(number: int, frame: FrameType | None) -> None:
        if kernel.is_interrupted:
            raise KeyboardInterrupt
        kernel.interrupt()

    signal.signal(signal.SIGINT, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if kernel.is_interrupted:  # after the last event
        raise KeyboardInterrupt
