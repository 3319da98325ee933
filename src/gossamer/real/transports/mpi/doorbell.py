"""A way to wake the receiving thread of another process on the same host.

MPI can only be asked, again and again, whether something has come. A datagram on the loopback
address costs the sender a few microseconds and lets the receiver sleep until then. It carries
nothing: a lost or forged one costs a look into MPI.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

_LOOPBACK = "127.0.0.1"


class Doorbell:
    """One process's bell, and the way to those of its neighbours."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((_LOOPBACK, 0))
        self._socket.setblocking(False)
        self._ports: dict[int, int] = {}

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    def know(self, neighbours: Sequence[tuple[int, int]]) -> None:
        """The (process, port) pairs of this host."""
        self._ports = dict(neighbours)

    def ring(self, process: int) -> None:
        """Wake a process, if it is on this host; one that is awake hears it later or never."""
        port = self._ports.get(process)
        if port is None:
            return
        try:
            self._socket.sendto(b"", (_LOOPBACK, port))
        except OSError:
            pass  # its bell is full or taken down: it looks by itself now and then

    def wait(self, seconds: float) -> bool:
        """Sleep until rung, or that long."""
        ready, _, _ = select.select([self._socket], [], [], seconds)
        while ready:
            try:
                self._socket.recv(1)
            except OSError:
                return True
        return False

    def close(self) -> None:
        self._ports = {}
        self._socket.close()
