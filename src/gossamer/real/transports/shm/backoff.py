"""Waiting for what other processes post."""

from __future__ import annotations

import os
import time

from gossamer.real.transports.shm.system import Bell
from gossamer.real.transports.transport import StopToken

_AWAKE_S = 0.02
"""Who waits gives way to others for so long, and only then sleeps: a processor that has fallen idle
is slow to wake, and a member that sleeps comes late to the next step, too."""
_THOROUGH = 16


class Vigil:
    """One wait. Call `pause` between two looks."""

    __slots__ = ("_bell", "_looks", "_stop", "_until")

    def __init__(self, bell: Bell, stop: StopToken) -> None:
        self._bell = bell
        self._stop = stop
        self._looks = 0
        self._until = 0.0

    @property
    def is_thorough(self) -> bool:
        """Whether it is time to look everywhere, and not only where things are likely to be."""
        return self._looks % _THOROUGH == _THOROUGH - 1

    def pause(self, seen: int) -> None:
        """`seen` is the bell's value before the last look."""
        now = time.monotonic()
        if not self._looks:
            self._until = now + _AWAKE_S
        if now < self._until:
            self._looks += 1
            os.sched_yield()
            return
        self._looks = _THOROUGH - 1
        self._stop.check()
        self._bell.wait(seen, self._stop.patience)
