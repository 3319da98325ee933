"""Waiting for an engine that can only be asked: busily at first, then with pauses that grow.

A blocking MPI call would keep a whole core busy for as long as it waits, and could not be stopped.
"""

from __future__ import annotations

import os
import time

from gossamer.real.transports.transport import StopToken

_SHORTEST_S = 20e-6
_LONGEST_S = 500e-6
_BUSY_ALONE_S = 1e-3
_BUSY_CROWDED_S = 200e-6


def busy_time(local_size: int) -> float:
    """How long asking busily harms nobody: long only where every process has a core to itself."""
    return _BUSY_ALONE_S if local_size <= (os.cpu_count() or 1) else _BUSY_CROWDED_S


class Patience:
    """One wait. Call `pause` between questions."""

    __slots__ = ("_busy_until", "_pause_s", "_stop")

    def __init__(self, stop: StopToken, busy_s: float) -> None:
        self._stop = stop
        self._busy_until = time.perf_counter() + busy_s
        self._pause_s = _SHORTEST_S

    def pause(self) -> None:
        """A yield, later a nap; raises `Stopped` when the run has been told to stop."""
        self._stop.check()
        if time.perf_counter() < self._busy_until:
            os.sched_yield()  # whoever is waited for may be waiting for this core
            return
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_S)
