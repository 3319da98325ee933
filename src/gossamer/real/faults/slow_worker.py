"""Slows this worker down by a factor: the worker sleeps after each step.

After a sleep a short step takes longer than usual, because caches are cold and the clock rate is
low. This is not corrected, so a worker whose steps take less than a millisecond may be 10 to 30 %
slower than the factor says.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from gossamer.real.transports.transport import StopToken

_FIRST = 3
"""So many first steps are not slowed down, because they load code and are not typical."""
_KEPT = 9
_LONGEST = 20.0
"""A step that lasts so many typical steps contains a pause, and a pause is not multiplied."""


class Slowness:
    """Makes steps last `factor` times as long."""

    def __init__(self, factor: float, check: Callable[[], None] = lambda: None) -> None:
        """The worker calls `check` while it sleeps; `check` may raise."""
        self._factor = factor
        self._check = check
        self._latest: deque[float] = deque(maxlen=_KEPT)
        self._owed = 0.0
        """Seconds that the worker has still to sleep; below 0 if it slept too long."""

    def lengthen(self, took: float) -> None:
        """A step has taken so long; sleep as long as a slower worker would still need."""
        if self._factor == 1.0:
            return
        self._latest.append(took)
        if len(self._latest) <= _FIRST:
            return
        step = min(took, _LONGEST * statistics.median(self._latest))
        self._owed += (self._factor - 1.0) * step
        began = time.perf_counter()
        while (left := self._owed - (time.perf_counter() - began)) > 0:
            self._check()
            time.sleep(min(left, StopToken.patience))
        self._owed = left
