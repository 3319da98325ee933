"""A stream of bytes from one process to another through a ring in the receiver's memory.

One process writes and one reads, and each has a counter of its own. A process moves its counter
after it has moved the bytes, so a writer that dies leaves whole frames and perhaps the beginning of
one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gossamer.real.transports.buffers import take
from gossamer.real.transports.shm.memory import CACHE_LINE, RING_BYTES, RING_HEAD_BYTES
from gossamer.real.transports.shm.system import Bell, fence

_WRITTEN, _TAKEN, _STARVED = 0, CACHE_LINE // 8, 2 * CACHE_LINE // 8
LENGTH_BYTES = 8
_LARGE = 1 << 16
NOTICE = 1 << 63
"""A bit in the length of a frame: this is the notice of a large frame."""


def _memory(length: int) -> memoryview:
    """Return memory for a frame; that of a large one comes from the pool."""
    return memoryview(bytearray(length)) if length < _LARGE else take(length).numpy().data


class RingWriter:
    """The sending side, which one thread at a time may use."""

    def __init__(self, region: memoryview) -> None:
        self._words = region[:RING_HEAD_BYTES].cast("Q")
        self._data = region[RING_HEAD_BYTES:]
        self._written = self._words[_WRITTEN]

    def write(self, content: memoryview) -> int:
        """Write as much as there is room for, and return how much; `publish` makes it visible."""
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
        """Whether the ring is full; then the reader rings when it has taken something."""
        self._words[_STARVED] = 1
        fence()
        return self._written - self._words[_TAKEN] == RING_BYTES


class RingReader:
    """The receiving side: it joins the bytes of frames, and opens large frames."""

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

    def skip_all(self) -> None:
        """Whoever wrote before has died, and another writer goes on where that one stopped."""
        self._taken = self._words[_WRITTEN]
        self._words[_TAKEN] = self._taken

    def frames(self) -> Iterator[memoryview]:
        """Yield the frames that are complete; the caller may keep them."""
        while self._fill():
            whole, self._filled = self._target, 0
            if self._in_length:
                length = int.from_bytes(whole, "little")
                self._is_notice = bool(length & NOTICE)
                self._target = _memory(length & ~NOTICE)
                self._in_length = False
                continue
            self._target = memoryview(bytearray(LENGTH_BYTES))
            self._in_length = True
            yield self._open_large(whole) if self._is_notice else whole

    def _fill(self) -> bool:
        """Read into the present target; return whether it is full."""
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
