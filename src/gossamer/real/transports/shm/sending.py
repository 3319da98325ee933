"""Frames on their way out: straight into the ring where there is room, else behind a thread.

Large ones are laid down beside the ring, and only the notice of them goes this way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from gossamer.real.transports.shm.large_frames import LARGE_BYTES, Packing
from gossamer.real.transports.shm.rings import LENGTH_BYTES, NOTICE, RingWriter, room_for
from gossamer.real.transports.shm.segments import Control
from gossamer.real.transports.transport import Part, Parts, StopToken

_JOINED_BYTES = 4096
_PIECE_BYTES = 1 << 18
_CLOSING_S = 5.0


def _joined(parts: Sequence[Part]) -> memoryview:
    """A copy: what was sent may be changed by its sender at once."""
    views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
    whole = room_for(sum(map(len, views)))
    at = 0
    for view in views:
        whole[at : at + len(view)] = view
        at += len(view)
    return whole


class _Outgoing:
    """What is still to be written to one process."""

    def __init__(self, ring: RingWriter, to: int, control: Control, packing: Packing) -> None:
        self._ring = ring
        self._to = to
        self._packing = packing
        self._bell = control.frames[to]
        self._lock = threading.Lock()
        self._backlog: deque[memoryview] = deque()
        self._is_dropped = False

    @property
    def is_empty(self) -> bool:
        return not self._backlog

    def send(self, parts: Parts) -> bool:
        """Whether something was left for the thread to do."""
        length = sum(memoryview(part).nbytes for part in parts)
        pieces: Sequence[Part] = [length.to_bytes(LENGTH_BYTES, "little"), *parts]
        notice = None
        if length >= LARGE_BYTES and not self._is_dropped:
            notice = self._packing.pack(self._to, parts, length)
        if notice is not None:
            pieces = [(NOTICE | len(notice)).to_bytes(LENGTH_BYTES, "little") + notice]
        elif length <= _JOINED_BYTES:
            pieces = [b"".join(pieces)]
        with self._lock:
            if self._is_dropped:
                return False
            if self._backlog:
                self._backlog.append(_joined(pieces))
                return True
            for number, piece in enumerate(pieces):
                view = memoryview(piece)
                if not view.nbytes:
                    continue
                view = view.cast("B")
                written = self._ring.write(view)
                if written < len(view):
                    self._backlog.append(_joined([view[written:], *pieces[number + 1 :]]))
                    break
            self._ring.publish()
            is_left = bool(self._backlog)
        self._bell.ring()
        return is_left

    def push(self) -> bool:
        """Write a piece of the backlog, if there is room; whether anything could be done."""
        with self._lock:
            if not self._backlog:
                return False
            content = self._backlog[0]
            written = self._ring.write(content[:_PIECE_BYTES])
            if written == 0:
                return not self._ring.is_full_and_said_so()
            self._ring.publish()
            if written == len(content):
                self._backlog.popleft()
            else:
                self._backlog[0] = content[written:]
        self._bell.ring()
        return True

    def drop(self) -> None:
        """Nobody will ever read it."""
        with self._lock:
            self._is_dropped = True
            self._backlog.clear()


class Sending:
    """All rings out of this process, and the thread that waits for room in them."""

    def __init__(
        self, rank: int, rings: dict[int, RingWriter], packing: Packing, control: Control,
        stop: StopToken,
    ) -> None:  # fmt: skip
        self._outgoing = {to: _Outgoing(ring, to, control, packing) for to, ring in rings.items()}
        self._control = control
        self._room = control.room[rank]
        self._stop = stop
        self._work = threading.Event()
        self._is_closing = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def send(self, to: int, parts: Parts) -> None:
        if self._outgoing[to].send(parts):
            self._ask_for_room()

    def drop(self, to: int) -> None:
        self._outgoing[to].drop()

    def close(self) -> None:
        """What was sent is still written, as long as those who receive it are there."""
        limit = time.monotonic() + _CLOSING_S
        while self._is_behind() and not self._stop.is_set and time.monotonic() < limit:
            time.sleep(1e-3)
        self._is_closing = True
        self._work.set()
        self._room.ring()
        if self._thread is not None:
            self._thread.join()

    def _is_behind(self) -> bool:
        for to, outgoing in self._outgoing.items():
            if self._control.is_gone(to):
                outgoing.drop()
        return not all(outgoing.is_empty for outgoing in self._outgoing.values())

    def _ask_for_room(self) -> None:
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="gossamer-sending", daemon=True
                    )
                    self._thread.start()
        self._work.set()

    def _run(self) -> None:
        while not self._is_closing:
            seen = self._room.value
            pushed = [outgoing.push() for outgoing in self._outgoing.values()]
            if any(pushed):
                continue
            if self._is_behind():
                self._room.wait(seen, self._stop.patience)
                continue
            self._work.clear()
            # A frame left behind between looking and clearing has set it before; look once more.
            if not self._is_behind():
                self._work.wait()
