"""A thread that does things at their time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from gossamer.real.transports.transport import Stopped, StopToken

_FAREWELL_S = 2.0


class Agenda(threading.Thread):
    """What is due first is done first, and at equal times what was entered first."""

    def __init__(self, stop: StopToken) -> None:
        super().__init__(name="gossamer links", daemon=True)
        self._stop_token = stop
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._changed = threading.Condition()
        self._numbers = count()
        self._is_closed = False

    def at(self, due: float, action: Callable[[], None]) -> None:
        """On the monotonic clock, not before; may be called by any thread."""
        with self._changed:
            heappush(self._entries, (due, next(self._numbers), action))
            self._changed.notify()

    def run(self) -> None:
        while (action := self._next()) is not None:
            try:
                action()
            except Stopped:
                return

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not (self._is_closed or self._stop_token.is_set):
                left = (
                    self._entries[0][0] - time.monotonic() if self._entries else StopToken.patience
                )
                if left <= 0:
                    return heappop(self._entries)[2]
                self._changed.wait(min(left, StopToken.patience))
        return None

    def close(self) -> None:
        """Nothing more is done, and no thread is left that the end of the program could cut off."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(_FAREWELL_S)
