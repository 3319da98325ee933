"""A wait for a condition that can only be polled: without pauses at first, then with them."""

from __future__ import annotations

import os
import time

from gossamer.real.transports.transport import StopToken

_SHORTEST_S = 20e-6


class Backoff:
    """One wait. Call `pause` between two looks at the condition. Or call `yields`, and sleep in a
    better way when it returns False."""

    __slots__ = ("_busy_until", "_longest", "_pause", "_stop")

    def __init__(self, stop: StopToken, busy: float, longest: float = 500e-6) -> None:
        """For `busy` seconds the wait does not sleep, because an idle processor is slow to wake. No
        later pause is longer than `longest`."""
        self._stop = stop
        self._busy_until = time.monotonic() + busy
        self._longest = longest
        self._pause = _SHORTEST_S

    def yields(self) -> bool:
        """Give the processor to other threads, one of which may be the one that is waited for, and
        return True. When it is time to sleep return False, or raise `Stopped`."""
        if time.monotonic() < self._busy_until:
            os.sched_yield()
            return True
        self._stop.check()
        return False

    def pause(self) -> None:
        if not self.yields():
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, self._longest)
