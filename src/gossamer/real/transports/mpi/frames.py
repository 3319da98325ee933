"""Frames between processes as MPI messages, and the thread that receives them.

A frame travels as 64-bit words; its tag says how many bytes of the last word do not count. One
more tag says goodbye: after it nothing comes from that process any more. A process that closes
goes on receiving, and throws away, until everybody has said goodbye, so that nobody's sends stay
open and leaving MPI hangs nobody.

The receiving thread also drives everything else that MPI only does while it is asked: sends under
way, reductions, and what others do to this process's windows from other hosts.
"""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gossamer.real.transports.buffers import joined_bytes, take
from gossamer.real.transports.mpi.doorbell import Doorbell
from gossamer.real.transports.mpi.engine import MPI
from gossamer.real.transports.transport import Listener, Parts, Stopped

Bytes = NDArray[np.uint8]

_WORD = 8
_GOODBYE = _WORD
_LARGE = 1 << 12
"""From about here MPI libraries wait for the receiver's answer before they send."""
_LOOKS = 3
"""Open MPI answers a look with what it knew before, and only then fetches what has come."""
_SHORTEST_S = 100e-6
_LONGEST_S = 500e-6
_LONGEST_ALONE_S = 5e-3


class Beside(Protocol):
    """What else the receiving thread drives."""

    def advance(self) -> bool:
        """Do what can be done at once; whether something is still under way."""
        ...


class MpiFrames:
    """Sends and receives for one process."""

    def __init__(self, communicator: MPI.Intracomm, doorbell: Doorbell, *, one_host: bool) -> None:
        self._communicator = communicator
        self._doorbell = doorbell
        # On one host others need nothing from MPI here but frames, and those ring.
        self._longest_s = _LONGEST_ALONE_S if one_host else _LONGEST_S
        self._sending = threading.Lock()
        self._under_way: list[tuple[MPI.Request, Bytes]] = []
        self._present = set(range(communicator.size)) - {communicator.rank}
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, listener: Listener, beside: Beside) -> None:
        """Receive from now on, until everybody, this process too, has closed."""

        def receive() -> None:
            try:
                self._receive(listener, beside)
            except BaseException:
                # Without its receiving thread this process would wait for ever, and so would all.
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
        """Say goodbye to everybody. The thread goes on until they have done so, too."""
        self._closed = True
        for process in range(self._communicator.size):
            if process != self._communicator.rank:
                self._hand_over(process, np.empty(0, np.uint8), _GOODBYE)
        self._doorbell.ring(self._communicator.rank)

    def join(self) -> None:
        """Wait until everybody has closed."""
        if self._thread is not None:
            self._thread.join()

    def _hand_over(self, to: int, frame: Bytes, tag: int) -> None:
        # MPI keeps the order of one thread's messages; the lock makes all threads one.
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
        """Everything that is there; whether there was anything."""
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
                pass  # whoever was resumed here has been told to stop; the others are told, too
        return True

    def _let_go(self) -> bool:
        """Forget the sends that have ended; whether any has not."""
        if not self._under_way:
            return False
        with self._sending:
            self._under_way = [pair for pair in self._under_way if not pair[0].Test()]
            return bool(self._under_way)
