"""Frames between processes as MPI messages, and the thread that receives them.

A frame travels as 64-bit words; its tag says how many bytes of the last word do not count. One more
tag says that the sender leaves and sends nothing more. A process that closes goes on receiving, and
discards what it receives, until all have left. So no send stays open, and MPI ends without hanging.

The receiving thread also drives everything that MPI only does when it is called: open sends,
all-reduces, and what processes of other hosts do to the windows of this process.

MPI can only be asked again and again whether something has come. So processes of one host wake each
other by a datagram (`Doorbell`).
"""

from __future__ import annotations

import select
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gossamer.real.transports.buffers import joined_bytes, take
from gossamer.real.transports.mpi.engine import MPI
from gossamer.real.transports.transport import Listener, Parts, Stopped

Bytes = NDArray[np.uint8]

_LOOPBACK = "127.0.0.1"
_WORD = 8
_GOODBYE = _WORD
_LARGE = 1 << 12
"""From about so many bytes on, MPI libraries wait for the receiver before they send."""
_LOOKS = 3
"""Open MPI answers a probe with what it knew before, and only then fetches new messages."""
_SHORTEST_S = 100e-6
_LONGEST_S = 500e-6
_LONGEST_ALONE_S = 5e-3


class Doorbell:
    """Wakes the receiving threads of processes on this host.

    A datagram on the loopback address costs the sender a few microseconds, and the receiver sleeps
    until it comes. It carries nothing, so a lost or forged datagram only costs a look into MPI.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((_LOOPBACK, 0))
        self._socket.setblocking(False)
        self._ports: dict[int, int] = {}

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    def know(self, neighbours: Sequence[tuple[int, int]]) -> None:
        """Learn the (process, port) pairs of this host."""
        self._ports = dict(neighbours)

    def ring(self, process: int) -> None:
        """Wake a process if it is on this host; a process that is awake may miss this."""
        port = self._ports.get(process)
        if port is None:
            return
        try:
            self._socket.sendto(b"", (_LOOPBACK, port))
        except OSError:
            pass  # its buffer is full or closed; it looks by itself from time to time

    def wait(self, seconds: float) -> bool:
        """Sleep until another process rings, but no longer than this; return whether one rang."""
        ready, _, _ = select.select([self._socket], [], [], seconds)
        while ready:
            try:
                self._socket.recv(1)
            except OSError:
                return True
        return False


class Beside(Protocol):
    """What else the receiving thread drives: the all-reduces."""

    def advance(self) -> bool:
        """Do what can be done at once; return whether something is still open."""
        ...


class MpiFrames:
    """Sends and receives for one process."""

    def __init__(self, communicator: MPI.Intracomm, doorbell: Doorbell, *, one_host: bool) -> None:
        self._communicator = communicator
        self._doorbell = doorbell
        # On one host only frames need this thread, and those ring the bell.
        self._longest_s = _LONGEST_ALONE_S if one_host else _LONGEST_S
        self._sending = threading.Lock()
        self._under_way: list[tuple[MPI.Request, Bytes]] = []
        self._present = set(range(communicator.size)) - {communicator.rank}
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, listener: Listener, beside: Beside) -> None:
        """Receive from now on, until all processes, also this one, have closed."""

        def receive() -> None:
            try:
                self._receive(listener, beside)
            except BaseException:
                # Without the receiving thread this process and all others would wait for ever.
                traceback.print_exc()
                sys.stderr.flush()
                MPI.COMM_WORLD.Abort(1)

        self._thread = threading.Thread(target=receive, name="gossamer-mpi", daemon=True)
        self._thread.start()

    def send(self, to: int, parts: Parts) -> None:
        """Send a copy of the parts."""
        padding = -sum(memoryview(part).nbytes for part in parts) % _WORD
        self._hand_over(to, joined_bytes(parts, padding).numpy(), padding)

    def close(self) -> None:
        """Tell all that this process leaves. The thread goes on until all others leave, too."""
        self._closed = True
        for process in range(self._communicator.size):
            if process != self._communicator.rank:
                self._hand_over(process, np.empty(0, np.uint8), _GOODBYE)
        self._doorbell.ring(self._communicator.rank)

    def join(self) -> None:
        """Wait until all processes have closed."""
        if self._thread is not None:
            self._thread.join()

    def _hand_over(self, to: int, frame: Bytes, tag: int) -> None:
        # MPI keeps messages in order only within one thread, so the lock orders the threads.
        with self._sending:
            request = self._communicator.Isend(frame.view(np.int64), to, tag)
            under_way = not request.Test()
            if under_way:
                self._under_way.append((request, frame))
        self._doorbell.ring(to)
        if under_way and len(frame) >= _LARGE:
            self._doorbell.ring(self._communicator.rank)

    def _receive(self, listener: Listener, beside: Beside) -> None:
        pause_s = _SHORTEST_S
        while True:
            came = self._receive_all(listener)
            busy = beside.advance()
            busy = self._let_go() or busy
            if self._closed and not self._present and not self._under_way:
                return
            rung = self._doorbell.wait(pause_s)
            longest = _LONGEST_S if busy else self._longest_s
            pause_s = _SHORTEST_S if came or rung else min(2 * pause_s, longest)

    def _receive_all(self, listener: Listener) -> bool:
        """Receive all that has come; return whether there was anything."""
        came, in_vain = False, 0
        while in_vain < _LOOKS:
            if self._receive_one(listener):
                came, in_vain = True, 0
            else:
                in_vain += 1
        return came

    def _receive_one(self, listener: Listener) -> bool:
        status = MPI.Status()
        message = self._communicator.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if message is None:
            return False
        source, tag = status.Get_source(), status.Get_tag()
        length = status.Get_count(MPI.INT64_T) * _WORD
        frame = take(length).numpy()
        message.Recv(frame.view(np.int64))
        if tag == _GOODBYE:
            self._present.discard(source)
        elif not self._closed:
            try:
                listener.frame(source, frame.data[: length - tag])
            except Stopped:
                pass  # a coroutine that was resumed here was told to stop, and so are the others
        return True

    def _let_go(self) -> bool:
        """Release the sends that have ended; return whether any has not."""
        if not self._under_way:
            return False
        with self._sending:
            self._under_way = [pair for pair in self._under_way if not pair[0].Test()]
            return bool(self._under_way)
