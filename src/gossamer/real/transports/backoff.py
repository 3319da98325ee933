"""Waiting for what can only be looked at again and again: busily at first, then with pauses."""

from __future__ import annotations

import os
import time

from gossamer.real.transports.transport import StopToken

_SHORTEST_S = 20e-6


class Backoff:
    """One wait. Between two looks call `pause`, or `yields` and then sleep in a better way."""

    __slots__ = ("_busy_until", "_longest", "_pause", "_stop")

    def __init__(self, stop: StopToken, busy: float, longest: float = 500e-6) -> None:
        """`busy` is for how many seconds looking without sleeping is worth its processor time: a
        processor that has fallen idle is slow to wake. `longest` bounds the pauses after that."""
        self._stop = stop
        self._busy_until = time.monotonic() + busy
        self._longest = longest
        self._pause = _SHORTEST_S

    def yields(self) -> bool:
        """Give the processor to others, who may be those that are waited for. False, without doing
        anything, when it is time to sleep; then the wait obeys a stop."""
        if time.monotonic() < self._busy_until:
            os.sched_yield()
            return True
        self._stop.check()
        return False

    def pause(self) -> None:
        if not self.yields():
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, self._longest)
