"""Where processes post what they put into all-reduces, one cell for each that is under way.

A process writes its own board only and reads all others. An operation is known by its key, the same
in every member; a key in a cell says that everything else in that cell may be read.
"""

from __future__ import annotations

from bisect import insort

import numpy as np

from gossamer.real.transports.shm.layout import CELLS, Layout, aligned
from gossamer.real.transports.shm.memory import Memory

TURN_BYTES = 1 << 25
"""About what a large cache holds."""
_TURNS = 40
"""Places that a small value takes turns in: whoever looks at few of them keeps their views."""


class Board:
    """The cells of one process."""

    def __init__(self, memory: Memory, layout: Layout) -> None:
        def field(number: int) -> memoryview:
            return memory.words(layout.cells + 8 * CELLS * number, CELLS)

        self.memory = memory
        self.keys = field(0)
        self.offsets = field(1)
        self.lengths = field(2)
        self.working = field(3)
        """The key again once the process has begun to reduce its own chunk; see also `making`."""
        self.published = field(4)
        """The key again once that chunk is there for the others."""
        self.finished = field(5)
        """The key again once the process needs nobody's contribution any longer."""
        self.opened = field(6)
        """By process: 1 once this one can read that one's arena; its own once it has one."""
        self._searched = np.frombuffer(self.keys, dtype=np.uint64)

    def find(self, key: int, likely: int, *, is_thorough: bool) -> int | None:
        """The cell with that key. Processes in step with each other use the same one; where that
        is empty, others are looked at only by who is thorough."""
        there = self.keys[likely]
        if there == key:
            return likely
        if not there and not is_thorough:
            return None
        cells = np.flatnonzero(self._searched == key)
        return int(cells[0]) if len(cells) else None


class Room:
    """Which bytes of a process's reduction memory are in use.

    In main memory small values take turns. What another process has just read is still in its
    cache, and writing there again means taking it away line by line: two processes that reduce
    0.8 MB in the same few places keep 0.56 of their speed, in turn 0.75.
    """

    def __init__(self, start: int, end: int, turn_bytes: int = 0) -> None:
        """The first `turn_bytes` are given out in turn; beyond them, the lowest that are free."""
        self._start = start
        self._end = end
        self._turn_end = min(start + turn_bytes, end)
        self._taken: list[tuple[int, int]] = []
        self._next = start

    def take(self, length: int) -> int | None:
        """The start of that many free bytes, or None."""
        length = aligned(max(1, length))  # a place of no bytes could not be told from the next
        turn_end = min(self._start + _TURNS * length, self._turn_end)
        at = self._next
        if at + length <= turn_end and (not self._taken or self._taken[-1][1] <= at):
            # Behind all others, as usual.
            self._next = at + length
            self._taken.append((at, self._next))
            return at
        place = self._first_gap(at, turn_end, length)
        if place is None:
            place = self._first_gap(self._start, self._end, length)
        if place is not None:
            self._next = place + length
            insort(self._taken, (place, place + length))
        return place

    def _first_gap(self, at: int, limit: int, length: int) -> int | None:
        for start, end in self._taken:
            if start - at >= length:
                break
            at = max(at, end)
        return at if limit - at >= length else None

    def give_back(self, start: int) -> None:
        self._taken = [taken for taken in self._taken if taken[0] != start]
