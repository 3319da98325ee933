"""How much slower than it could this worker is asked to be, and how it gets there.

A gradient that follows a sleep takes longer: in the meantime caches and clock rate were lost to
others. A short one may take two or three times as long. So what is multiplied is its time without
that excess, which shows by comparison: now and then a few steps follow each other without a sleep,
and what was left out is made up for.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import deque
from collections.abc import Callable

from gossamer.real.transports.transport import StopToken

_FEWEST, _MOST = 3, 8
"""Undisturbed steps at the beginning; the fewest, if they are long."""
_BEGINNING_S = 0.1
_LONG_S = 0.02
"""What a sleep does to the step behind it does not matter to one of this length."""
_KEPT = 9
_RAREST = 128
"""Steps from one row without sleeps to the next, at most: fewer in the beginning."""
_ROW = 3
"""So many sleeps in a row are left out; the step behind them is undisturbed."""
_MOST_BEHIND = 4.0
"""So many slow steps' time can be caught up with."""
_LONGEST = 20.0
"""Times a usual step: more is no step but a pause, and a pause is not multiplied."""


def own_slow_factor(rank: int) -> float:
    """1 for a worker that nobody slows down on purpose."""
    faults = json.loads(os.environ.get("GOSSAMER_FAULTS") or "{}")
    return max(1.0, float(faults.get("slow", {}).get(str(rank), 1.0)))


class Slowness:
    """Makes steps last `factor` times as long as they would, on average and nearly each."""

    def __init__(self, factor: float, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called while it sleeps, and may raise."""
        self._factor = factor
        self._check = check
        self._undisturbed: deque[float] = deque(maxlen=_KEPT)
        self._disturbed: deque[float] = deque(maxlen=_KEPT)
        """Steps that followed a sleep."""
        self._beginning: list[float] = []
        self._owed = 0.0
        """Seconds of sleep that the steps so far are short of."""
        self._since_sleep = 0
        self._steps_to_row = self._gap = 8

    def lengthen(self, took: float) -> None:
        """A step has taken that long; return when so much slower a worker would have made it."""
        if self._factor == 1.0:
            return
        if not self._undisturbed:
            self._begin(took)
        else:
            is_disturbed = self._since_sleep == 0 and took < _LONG_S
            if is_disturbed:
                self._disturbed.append(took)
            elif self._since_sleep >= _ROW or took >= _LONG_S:
                self._undisturbed.append(took)
            self._owe(took, self._excess if is_disturbed else 0.0)
        if self._undisturbed:
            self._sleep()

    def _begin(self, took: float) -> None:
        """The first steps go by undisturbed; the first of all may be a very long one."""
        self._beginning.append(took)
        count, total = len(self._beginning), sum(self._beginning)
        if count == _MOST or (count >= _FEWEST and total > _BEGINNING_S):
            self._undisturbed.extend(self._beginning)
            for step in self._beginning:
                self._owe(step, 0.0)

    @property
    def _excess(self) -> float:
        """How much longer a step takes that follows a sleep."""
        usual = statistics.median(self._undisturbed)
        return max(0.0, statistics.median(self._disturbed) - usual)

    def _owe(self, took: float, excess: float) -> None:
        usual = statistics.median(self._undisturbed)
        # No sleep makes a step much longer than that: where it seems so, the machine is slower now.
        own = min(max(took - excess, took / 4), _LONGEST * usual)
        least = -_MOST_BEHIND * self._factor * usual
        self._owed = max(self._owed + self._factor * own - took, least)

    def _sleep(self) -> None:
        self._steps_to_row -= 1
        is_in_row = self._steps_to_row <= 0
        if self._steps_to_row == 1 - _ROW:
            self._gap = min(2 * self._gap, _RAREST)
            self._steps_to_row = self._gap
        if is_in_row or self._owed <= 0:
            self._since_sleep += 1
            return
        self._since_sleep = 0
        began = time.perf_counter()
        while (left := self._owed - (time.perf_counter() - began)) > 0:
            self._check()
            time.sleep(min(left, StopToken.patience))
        self._owed = left
