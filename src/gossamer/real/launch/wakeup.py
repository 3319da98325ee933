"""What wakes a sleeping launcher: output of its workers, the end of one of them, or a call.

To poll every few milliseconds would take processor time from the workers.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
from contextlib import suppress

from gossamer.real.launch.process import Process


class Wakeup:
    """The sleep of a launcher, which ends when something happens."""

    def __init__(self, pipes: selectors.BaseSelector) -> None:
        """`pipes` has the output of the workers."""
        self.sees_all = sys.platform == "linux"
        """Whether output and ends of workers end a sleep, which not every system can do."""
        self._calls, self._caller = socket.socketpair()
        self._calls.setblocking(False)
        self._caller.setblocking(False)
        self._sources = selectors.DefaultSelector()
        self._sources.register(self._calls, selectors.EVENT_READ)
        self._ends: set[int] = set()
        if sys.platform == "linux":
            assert isinstance(pipes, selectors.EpollSelector)
            self._sources.register(pipes.fileno(), selectors.EVENT_READ)

    def watch(self, process: Process) -> None:
        if sys.platform != "linux":
            return
        try:
            end = os.pidfd_open(process.pid)
        except OSError:
            self.sees_all = False  # an old kernel, or too many files
            return
        self._ends.add(end)
        self._sources.register(end, selectors.EVENT_READ)

    def call(self) -> None:
        """Wake the launcher. Any thread and any signal handler may call this."""
        # A full buffer wakes the launcher too, and after `close` it does not sleep.
        with suppress(OSError):
            self._caller.send(b"!")

    def sleep(self, seconds: float) -> None:
        for key, _ in self._sources.select(seconds):
            if key.fd == self._calls.fileno():
                self._calls.recv(1 << 12)
            elif key.fd in self._ends:
                self._sources.unregister(key.fd)
                self._ends.remove(key.fd)
                os.close(key.fd)

    def close(self) -> None:
        self._sources.close()
        for end in self._ends:
            os.close(end)
        self._ends.clear()
        self._calls.close()
        self._caller.close()
