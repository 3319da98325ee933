"""How far the streams of processes that share a GPU have come: a word for each, its signal.

A process has its stream set its signal to ever higher numbers, and has it wait for those of others.
It does so only for what they have asked of the GPU already, so no two ever wait for each other.

The signal of a process that was killed stays where it is, and streams that wait for more stand
still; so may threads of their processes, whichever. So it is the launcher who looks how far the
dead had come, writes that down where all look who have waited, and then sets the signal. What the
dead had asked of the GPU must be over by then. The system tears its queues down before it tells of
its end; to be sure, the signal is looked at until it has not moved for some time.
"""

from __future__ import annotations

import time

from gossamer.real.transports.shm.signals import Signals
from gossamer.real.transports.shm.system import fence
from gossamer.real.transports.transport import StopToken

SUMS, TURNS = range(2)
"""What they are for; see `ahead` and `line`."""
_PURPOSES = 2
_NEVER = 1 << 62
"""Beyond all numbers."""
_STILL_S, _LOOK_S, _GUARD_S = 0.03, 0.005, 10.0


def count_of_words(size: int) -> int:
    """Two for each process and purpose, and one that says whether any is in use."""
    return 2 * _PURPOSES * size + 1


def release(words: memoryview, size: int, dead: int) -> None:
    """Let the streams go on that wait for it."""
    if not words[2 * _PURPOSES * size]:
        return
    own = [2 * purpose * size + dead for purpose in range(_PURPOSES)]
    seen, since = [words[at] for at in own], time.monotonic()
    while time.monotonic() < since + _STILL_S:
        time.sleep(_LOOK_S)
        now = [words[at] for at in own]
        if now != seen:
            seen, since = now, time.monotonic()
    for at, last in zip(own, seen, strict=True):
        words[at + size] = last + 1
    fence()  # who sees the signal sees this
    until = time.monotonic() + _GUARD_S
    while time.monotonic() < until:
        # Should the dead have left somebody behind who keeps its queues alive, they may come to set
        # it once more.
        for at in own:
            words[at] = _NEVER
        time.sleep(_LOOK_S)


class Words:
    """Those for one purpose, as a process sees them."""

    def __init__(
        self, purpose: int, words: memoryview, size: int, signals: Signals, stop: StopToken
    ) -> None:
        self._first = 2 * purpose * size
        self._signals = signals
        self._stop = stop
        self._come = words[self._first : self._first + size]
        self._left = words[self._first + size : self._first + 2 * size]
        self.left = self._first + size
        """The first of the words that say, by process, from which number on it has set none; 0 for
        the living."""
        words[2 * _PURPOSES * size] = 1

    def set(self, process: int, number: int) -> None:
        """Once the present stream has come to it."""
        self._signals.set(self._first + process, number)

    def wait(self, process: int, number: int) -> None:
        """The present stream does; whether it was the process that set it is known afterwards."""
        # Where it has come already, what its stream did before is there for all to see.
        if self._come[process] < number:
            self._signals.wait(self._first + process, number)

    def has_come(self, process: int, number: int) -> bool:
        """Whether that process has come so far; waits until it has, or never will."""
        while self._come[process] < number:
            self._stop.check()
            time.sleep(1e-4)
        return not self.is_left_out(process, number)

    def finish(self, process: int, number: int) -> None:
        """Wait until that process, this one, has come so far: it has asked for it."""
        while self._come[process] < number:
            time.sleep(1e-4)

    def is_left_out(self, process: int, number: int) -> bool:
        """Whether it is known that it will never come so far."""
        return 0 < self._left[process] <= number
