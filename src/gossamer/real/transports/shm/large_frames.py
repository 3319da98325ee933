"""Large frames do not go through a ring: they lie in the sender's memory, and the ring says where.

The sender copies a frame into its own shared memory, once. The receiver reads it there, and keeps
it for as long as it likes: when the last view of it is gone, it writes so into its own memory, and
the sender uses the place again. So a frame is moved once and not four times, and nobody hands over
pieces. Where there is no place left, because receivers keep what they got, a frame goes through the
ring as smaller ones do.

What a receiver that has died did not release is free; what one that has closed its transport still
holds is not.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from gossamer.real.transports.buffers import copy_parts
from gossamer.real.transports.shm.memory import DEAD, LARGE_FRAMES, Control, FreeList, SharedMemory
from gossamer.real.transports.transport import Part

LARGE_BYTES = 1 << 18
"""From here on a frame is large. The copy of a smaller one through the ring stays in the cache."""
_NOTICE = struct.Struct("<QQQQ")


class LargeFrameSender:
    """The large frames that this process has sent and that may still be in use."""

    def __init__(
        self,
        memory: SharedMemory,
        free: FreeList,
        released: Mapping[int, memoryview],
        control: Control,
    ) -> None:
        """`released` are the words of each receiver: what it has released, by slot."""
        self._memory = memory
        self._free = free
        self._released = released
        self._control = control
        self._lock = threading.Lock()
        self._slots = {to: list(range(LARGE_FRAMES)) for to in released}
        self._sent: dict[tuple[int, int], tuple[int, int]] = {}
        """By receiver and slot: the frame's number and its place."""
        self._number = 0

    def pack(self, to: int, parts: Sequence[Part], length: int) -> bytes | None:
        """The notice to be sent instead of the frame; None if there is no place for it."""
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

    def _reclaim(self) -> None:
        for (to, slot), (number, offset) in list(self._sent.items()):
            if self._released[to][slot] == number or self._control.state(to) == DEAD:
                del self._sent[to, slot]
                self._slots[to].append(slot)
                self._free.give_back(offset)


class LargeFrameReceiver:
    """The large frames of one sender, at their receiver."""

    def __init__(self, memory: SharedMemory, released: memoryview) -> None:
        self._memory = memory
        self._released = released

    def open(self, notice: memoryview) -> memoryview:
        slot, number, offset, length = _NOTICE.unpack(notice)
        lent = np.frombuffer(self._memory.region(offset, length), dtype=np.uint8)
        weakref.finalize(lent, self._release, slot, number).atexit = False
        return memoryview(lent)  # pyright: ignore[reportArgumentType]

    def _release(self, slot: int, number: int) -> None:
        # Called wherever the last view dies: no lock may be taken here.
        self._released[slot] = number
