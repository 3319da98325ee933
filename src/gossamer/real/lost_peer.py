"""The loss of a peer that ends a user's loop: it is told in one sentence, without a traceback."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from types import TracebackType
from typing import Any

from gossamer.errors import PeerLost, ServerLost
from gossamer.real.addresses import Addresses
from gossamer.real.transports.transport import StopToken


def server_lost(lost: PeerLost, size: int, servers: int) -> ServerLost | None:
    """The error for the loss of a server; None if no server was lost.

    The address of a server comes after those of the workers, and users need not know it. A request
    fails with this address, a one-sided operation with the rank of the process of the server.
    """
    server = lost.peer - size if lost.peer >= size else lost.peer
    return ServerLost(server, server % size) if server < servers else None


def last_words(lost: PeerLost, addresses: Addresses, stop: StopToken) -> PeerLost:
    """The error that the loop raises. If it ends the program, only its sentence is printed."""
    error = server_lost(lost, addresses.size, len(addresses.slices)) or lost.with_traceback(None)
    before = sys.excepthook

    def hook(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        if value is not error:
            before(kind, value, traceback)
            return
        print(f"gossamer: {value}", file=sys.stderr, flush=True)
        stop.is_hopeless = True
        _end()

    sys.excepthook = hook
    return error


def _end() -> None:
    """End as the interpreter does, but do not take modules apart: with torch that takes half a
    second of a processor, and all workers do it at once."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    functions: Any = atexit  # they have no public way of being called
    functions._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
