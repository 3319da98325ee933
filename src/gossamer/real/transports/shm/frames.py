"""Frames between processes through rings in shared memory.

The sending thread writes a frame into the ring if there is room; otherwise a thread of this module
writes it later. A frame of 256 KB or more stays beside the ring, and only a notice of it goes
through the ring (`large_frames`). In the receiving process one thread gives arriving frames to the
listener, and tells it of deaths.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

from gossamer.real.transports.buffers import joined_bytes
from gossamer.real.transports.shm.large_frames import LARGE_BYTES, LargeFrameSender
from gossamer.real.transports.shm.memory import CLOSED, DEAD, OPEN, Control
from gossamer.real.transports.shm.rings import LENGTH_BYTES, NOTICE, RingReader, RingWriter
from gossamer.real.transports.transport import Listener, Part, Parts, Stopped, StopToken

_JOINED_BYTES = 4096
_PIECE_BYTES = 1 << 18
_CLOSING_S = 5.0

_LOOK_S = 0.5
"""How often the receiving thread looks whether the launcher lives; all other events ring a bell."""
_AT_ONCE = 64
"""How many frames of one process are delivered before those of the next."""


class _Outgoing:
    """The frames to one process, and those that could not be written yet."""

    def __init__(
        self, ring: RingWriter, to: int, control: Control, large_frames: LargeFrameSender
    ) -> None:
        self._ring = ring
        self._to = to
        self._large_frames = large_frames
        self._bell = control.frames[to]
        self._lock = threading.Lock()
        self._backlog: deque[memoryview] = deque()
        self._is_dropped = False

    @property
    def is_empty(self) -> bool:
        return not self._backlog

    def send(self, parts: Parts) -> bool:
        """Send a frame; return whether a part of it is left for the thread."""
        length = sum(memoryview(part).nbytes for part in parts)
        pieces: Sequence[Part] = [length.to_bytes(LENGTH_BYTES, "little"), *parts]
        notice = None
        if length >= LARGE_BYTES and not self._is_dropped:
            notice = self._large_frames.pack(self._to, parts, length)
        if notice is not None:
            pieces = [(NOTICE | len(notice)).to_bytes(LENGTH_BYTES, "little") + notice]
        elif length <= _JOINED_BYTES:
            pieces = [b"".join(pieces)]
        with self._lock:
            if self._is_dropped:
                return False
            if self._backlog:
                self._backlog.append(joined_bytes(pieces).numpy().data)
                return True
            for number, piece in enumerate(pieces):
                view = memoryview(piece)
                if not view.nbytes:
                    continue
                view = view.cast("B")
                written = self._ring.write(view)
                if written < len(view):
                    rest = joined_bytes([view[written:], *pieces[number + 1 :]])
                    self._backlog.append(rest.numpy().data)
                    break
            self._ring.publish()
            is_left = bool(self._backlog)
        self._bell.ring()
        return is_left

    def push(self) -> bool:
        """Write a piece of the backlog if there is room; return whether anything was done."""
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
        """Discard everything, because its receiver is gone."""
        with self._lock:
            self._is_dropped = True
            self._backlog.clear()

    def begin_again(self, ring: RingWriter, released: memoryview) -> None:
        """The receiver has come back."""
        with self._lock:
            self._ring = ring
            self._large_frames.begin_again(self._to, released)
            self._backlog.clear()
            self._is_dropped = False


class FrameSender:
    """The rings to all other processes, and the thread that waits for room in them."""

    def __init__(
        self, rank: int, rings: dict[int, RingWriter], large_frames: LargeFrameSender,
        control: Control, stop: StopToken,
    ) -> None:  # fmt: skip
        self._outgoing = {
            to: _Outgoing(ring, to, control, large_frames) for to, ring in rings.items()
        }
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

    def begin_again(self, to: int, ring: RingWriter, released: memoryview) -> None:
        self._outgoing[to].begin_again(ring, released)

    def close(self) -> None:
        """Write what has been sent, as long as its receivers exist, and end the thread."""
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
            # A sender may have left a frame between the look and `clear`, so look once more.
            if not self._is_behind():
                self._work.wait()


class Connections(Protocol):
    """What the receiving thread does about processes that go and come."""

    def drop(self, process: int) -> None:
        """It is gone, and reads nothing that is sent to it."""
        ...

    def greet(self, process: int) -> RingReader | None:
        """A process has opened its memory: use that from now on, and tell it so. None if it is gone
        again."""
        ...

    def has_greeted(self, process: int) -> bool:
        """Whether it uses our memory."""
        ...

    def connect(self, process: int) -> None:
        """Both use the memory of each other: frames may be sent."""
        ...


class FrameReceiver:
    """The thread that receives all frames. It holds no lock while it calls the listener."""

    def __init__(
        self, rank: int, rings: Mapping[int, RingReader], control: Control, listener: Listener,
        stop: StopToken, connections: Connections, absent: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.lost = absent
        self._rank = rank
        self._rings = dict(rings)
        self._greeted: dict[int, int] = {}
        """By process to which this one is connected or connects: in which of its lives."""
        self._greeted |= {source: 0 for source in rings if source not in absent}
        self._closed: set[int] = set()
        self._control = control
        self._bell = control.frames[rank]
        self._listener = listener
        self._stop = stop
        self._connections = connections
        self._to_self: deque[memoryview] = deque()
        self._is_closing = False
        self._launcher = os.getppid()
        self._thread = threading.Thread(target=self._run, name="gossamer-receiving", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send_to_self(self, parts: Parts) -> None:
        self._to_self.append(memoryview(bytearray(b"".join(parts))))
        self._bell.ring()

    def close(self) -> None:
        self._is_closing = True
        self._bell.ring()
        # A listener may close its own transport, and a thread cannot wait for itself.
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                seen = self._bell.value
                if self._deliver():
                    continue
                self._bell.wait(seen, _LOOK_S)
                if os.getppid() != self._launcher:
                    # The launcher is gone, so nobody would report deaths or end this process.
                    self._stop.set()
        except Stopped:
            pass  # the listener was told to stop, which ends this thread
        except BaseException:
            # Without this thread all others would wait for ever.
            self._stop.set()
            raise

    def _deliver(self) -> bool:
        """Give arrived frames to the listener; return whether there were any."""
        came = False
        for source in self._rings:
            if source in self.lost:
                came |= self._is_back(source)
                continue
            # The state is read before the ring, so that a dead process has written everything.
            state = self._control.state(source)
            is_dead = state == DEAD or self._control.life(source) != self._greeted[source]
            most = None if is_dead or state == CLOSED else _AT_ONCE
            for frame in islice(self._rings[source].frames(), most):
                came = True
                self._listener.frame(source, frame)
            if is_dead:
                del self._greeted[source]
                self.lost |= {source}
                self._connections.drop(source)
                self._listener.lost(source)
            elif state == CLOSED and source not in self._closed:
                self._closed.add(source)
                self._listener.closed(source)
        for _ in range(len(self._to_self)):
            came = True
            self._listener.frame(self._rank, self._to_self.popleft())
        return came

    def _is_back(self, source: int) -> bool:
        """Connect to a process that has come during the run, or before this one. Each of the two
        greets the other, and sends once it is greeted."""
        life = self._control.life(source)
        if self._control.state(source) != OPEN:
            return False
        if self._greeted.get(source) != life:
            reader = self._connections.greet(source)
            if reader is None:
                return False
            self._rings[source], self._greeted[source] = reader, life
        if not self._connections.has_greeted(source):
            return False
        self._connections.connect(source)
        self.lost -= {source}
        self._listener.joined(source)
        return True
