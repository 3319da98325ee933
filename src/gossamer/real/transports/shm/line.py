"""Turns at windows on a GPU for which its streams wait, and no process does; see `turns`.

Behind each of its turns a process has its stream set its signal to the turn's number. Who comes
next has its own stream wait for that, and goes on at once. If a process dies, the streams that
wait for it are let go: of what it did last each element may be there or not, as in main memory.
"""

from __future__ import annotations

import threading

from gossamer.real.transports.shm.signals import Signals
from gossamer.real.transports.shm.words import Words


class Line:
    """The turns of one process, at whatever windows."""

    def __init__(self, rank: int, words: Words, signals: Signals) -> None:
        self._rank = rank
        self._words = words
        self._signals = signals
        self._lock = threading.Lock()
        self._stream: int | None = None
        self._number = 0
        self._waited: dict[int, int] = {}
        """By process: the highest number that a stream here was told to wait for."""

    def end_turn(self) -> int | None:
        """The turn's number; None where this is another stream than before, whose order with that
        is not known."""
        stream = self._signals.present()
        with self._lock:  # numbers must rise in the order in which the stream comes to them
            if self._stream is None:
                self._stream = stream
            if stream != self._stream:
                return None
            self._number += 1
            self._words.set(self._rank, self._number)
            return self._number

    def follow(self, process: int, number: int) -> None:
        """What the present stream is asked for from here on comes behind that turn."""
        if process == self._rank and self._signals.present() == self._stream:
            return  # a stream does everything in order anyway
        self._words.wait(process, number)
        self._waited[process] = max(number, self._waited.get(process, 0))

    def has_ended(self, process: int, number: int) -> bool:
        """Whether a GPU has done all of that turn; waits until it has, or never will."""
        return self._words.has_come(process, number)

    @property
    def torn_updates(self) -> int:
        """Of which this process knows: it was told to come behind a turn that never ended."""
        waited = self._waited.copy()
        return sum(self._words.is_left_out(*turn) for turn in waited.items())

    def finish(self) -> None:
        """Wait for all turns of this process: nobody will wait for them when it has gone."""
        self._words.finish(self._rank, self._number)
