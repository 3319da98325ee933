"""Large frames stay in the sender's memory, and only a notice of them goes through the ring.

The sender copies a frame into its own shared memory. The receiver reads the frame there, and keeps
it as long as it likes. When the last view of the frame is gone, the receiver writes that into its
own memory, and the sender uses the place again. So a frame is copied once and not four times. If
there is no place left, because receivers keep frames, a frame goes through the ring as smaller ones
do.

The frames of a receiver that died are free; those of one that closed its transport are not.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from gossamer.real.transports.buffers import copy_parts
from gossamer.real.transports.shm.memory import DEAD, LARGE_FRAMES, Control, FreeList, SharedMemory
from gossamer.real.transports.transport import Part

LARGE_BYTES = 1 << 18
"""A frame of so many bytes is large. The copies of a smaller one stay in the cache."""
_NOTICE = struct.Struct("<QQQQ")


class LargeFrameSender:
    """The large frames that this process has sent and that receivers may still use."""

    def __init__(
        self,
        memory: SharedMemory,
        free: FreeList,
        released: dict[int, memoryview],
        control: Control,
        first: int = 0,
    ) -> None:
        """`released` holds the words of each receiver: the frame that it released last, by slot.
        Frames are numbered from `first` on, so that those of two lives of a process differ."""
        self._memory = memory
        self._free = free
        self._released = released
        self._control = control
        self._lock = threading.Lock()
        self._slots = {to: list(range(LARGE_FRAMES)) for to in released}
        self._sent: dict[tuple[int, int], tuple[int, int]] = {}
        """By receiver and slot: the number and the place of the frame."""
        self._number = first

    def pack(self, to: int, parts: Sequence[Part], length: int) -> bytes | None:
        """Store a frame and return the notice of it, or None if there is no place."""
        with self._lock:
            self._reclaim()
            slots = self._slots[to]
            offset = self._free.take(length) if slots else None
            if offset is None:
                return None
            slot = slots.pop()
            self._number += 1
            number = self._number
            self._sent[to, slot] = (number, offset)
        target = np.frombuffer(self._memory.region(offset, length), dtype=np.uint8)
        copy_parts(parts, target)
        return _NOTICE.pack(slot, number, offset, length)

    def begin_again(self, to: int, released: memoryview) -> None:
        """A receiver has come back: it will read nothing of what was sent to its earlier life."""
        with self._lock:
            for place, (_, offset) in list(self._sent.items()):
                if place[0] == to:
                    del self._sent[place]
                    self._free.give_back(offset)
            self._slots[to] = list(range(LARGE_FRAMES))
            self._released[to] = released

    def _reclaim(self) -> None:
        for (to, slot), (number, offset) in list(self._sent.items()):
            if self._released[to][slot] == number or self._control.state(to) == DEAD:
                del self._sent[to, slot]
                self._slots[to].append(slot)
                self._free.give_back(offset)


class LargeFrameReceiver:
    """The large frames of one sender, in their receiver."""

    def __init__(self, memory: SharedMemory, released: memoryview) -> None:
        self._memory = memory
        self._released = released

    def open(self, notice: memoryview) -> memoryview:
        slot, number, offset, length = _NOTICE.unpack(notice)
        lent = np.frombuffer(self._memory.region(offset, length), dtype=np.uint8)
        weakref.finalize(lent, self._release, slot, number).atexit = False
        return memoryview(lent)  # pyright: ignore[reportArgumentType]

    def _release(self, slot: int, number: int) -> None:
        # Any thread may call this, at any time, so it must not take a lock.
        self._released[slot] = number
