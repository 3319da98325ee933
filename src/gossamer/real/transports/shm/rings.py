"""A stream of bytes from one process to another through a ring in the receiver's memory.

One process writes and one reads, each has its own counter, and a counter moves only after the bytes
have: so a writer that dies leaves whole frames and at most the beginning of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gossamer.real.transports.buffers import take
from gossamer.real.transports.shm.memory import CACHE_LINE, RING_BYTES, RING_HEAD_BYTES
from gossamer.real.transports.shm.system import Bell, fence

_WRITTEN, _TAKEN, _STARVED = 0, CACHE_LINE // 8, 2 * CACHE_LINE // 8
LENGTH_BYTES = 8
NOTICE = 1 << 63
"""In the length of a frame: it is the notice of one that lies elsewhere."""


class RingWriter:
    """The sending side; its user sees to it that one thread at a time comes here."""

    def __init__(self, region: memoryview) -> None:
        self._words = region[:RING_HEAD_BYTES].cast("Q")
        self._data = region[RING_HEAD_BYTES:]
        self._written = self._words[_WRITTEN]

    def write(self, content: memoryview) -> int:
        """Put in as much as there is room for and return how much; `publish` makes it seen."""
        room = RING_BYTES - (self._written - self._words[_TAKEN])
        length = min(room, len(content))
        at = self._written % RING_BYTES
        first = min(length, RING_BYTES - at)
        self._data[at : at + first] = content[:first]
        if length > first:
            self._data[: length - first] = content[first:length]
        self._written += length
        return length

    def publish(self) -> None:
        fence()
        self._words[_WRITTEN] = self._written

    def is_full_and_said_so(self) -> bool:
        """Ask the reader to ring when it has taken something, unless it has already."""
        self._words[_STARVED] = 1
        fence()
        return self._written - self._words[_TAKEN] == RING_BYTES


class RingReader:
    """The receiving side: puts frames together again, and opens those that lie elsewhere."""

    def __init__(
        self, region: memoryview, room: Bell, open_large: Callable[[memoryview], memoryview]
    ) -> None:
        self._words = region[:RING_HEAD_BYTES].cast("Q")
        self._data = region[RING_HEAD_BYTES:]
        self._room = room
        self._taken = self._words[_TAKEN]
        self._target = memoryview(bytearray(LENGTH_BYTES))
        self._filled = 0
        self._in_length = True
        self._is_notice = False
        self._open_large = open_large

    def frames(self) -> Iterator[memoryview]:
        """The frames that are complete by now; each is the caller's to keep."""
        while self._fill():
            whole, self._filled = self._target, 0
            if self._in_length:
                length = int.from_bytes(whole, "little")
                self._is_notice = bool(length & NOTICE)
                self._target = take(length & ~NOTICE).numpy().data
                self._in_length = False
                continue
            self._target = memoryview(bytearray(LENGTH_BYTES))
            self._in_length = True
            yield self._open_large(whole) if self._is_notice else whole

    def _fill(self) -> bool:
        """Take what there is for the present target; whether it is full."""
        wanted = len(self._target) - self._filled
        length = min(wanted, self._words[_WRITTEN] - self._taken)
        if length:
            at = self._taken % RING_BYTES
            first = min(length, RING_BYTES - at)
            self._target[self._filled : self._filled + first] = self._data[at : at + first]
            if length > first:
                rest = self._data[: length - first]
                self._target[self._filled + first : self._filled + length] = rest
            self._filled += length
            self._taken += length
            self._words[_TAKEN] = self._taken
            fence()
            if self._words[_STARVED]:
                self._words[_STARVED] = 0
                self._room.ring()
        return length == wanted
