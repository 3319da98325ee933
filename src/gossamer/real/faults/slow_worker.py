"""Slows this worker down by a factor: it sleeps after each step.

A short step that follows a sleep takes longer than it would, because caches and clock rate were
lost in the meantime. That is not corrected, so that a worker whose steps take less than a
millisecond may be 10 to 30 % slower than asked for.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from gossamer.real.transports.transport import StopToken

_FIRST = 3
"""Steps that are not slowed down: code is loaded in them, and what is usual is not known yet."""
_KEPT = 9
_LONGEST = 20.0
"""Times a usual step: more is no step but a pause, and a pause is not multiplied."""


class Slowness:
    """Makes steps last `factor` times as long as they would."""

    def __init__(self, factor: float, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called while it sleeps, and may raise."""
        self._factor = factor
        self._check = check
        self._latest: deque[float] = deque(maxlen=_KEPT)
        self._owed = 0.0
        """Seconds of sleep that the steps so far are short of; below 0 where it slept too long."""

    def lengthen(self, took: float) -> None:
        """A step has taken that long; return when so much slower a worker would have made it."""
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
