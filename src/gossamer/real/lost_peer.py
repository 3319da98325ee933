"""A loss that ends a user's loop: one sentence instead of the library's frames, then the end."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from types import TracebackType
from typing import Any

from gossamer.errors import PeerLost, ServerLost
from gossamer.real.router import Addresses
from gossamer.real.transports.transport import StopToken


def server_lost(lost: PeerLost, size: int, servers: int) -> ServerLost | None:
    """If it is a server that was lost. They are numbered after the workers, which nobody outside
    needs to know; one-sided words name the process, questions the end that they are for."""
    server = lost.peer - size if lost.peer >= size else lost.peer
    return ServerLost(server, server % size) if server < servers else None


def last_words(lost: PeerLost, addresses: Addresses, stop: StopToken) -> PeerLost:
    """What the loop raises. If it ends the program, that says the sentence and nothing else."""
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
    """As the interpreter ends, but for taking itself apart: with torch that takes half a second of
    a processor, and all workers do it at once."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    functions: Any = atexit  # they have no public way of being called
    functions._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
