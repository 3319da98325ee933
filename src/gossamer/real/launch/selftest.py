"""A small test of a transport: one frame, one read and one all-reduce with the neighbours.

`gossamer doctor --try` starts it as a module under each launcher.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import TypeVar

import torch

from gossamer.errors import ConfigurationError, Error, Late, PeerLost
from gossamer.pending import Pending
from gossamer.real.launch.environment import connect
from gossamer.real.transports.transport import StopToken, Transport, Window

T = TypeVar("T")
_PATIENCE_S = 10.0
_WIDTH = 4


class _Inbox:
    """A listener that keeps frames and deaths."""

    def __init__(self) -> None:
        self.frames: queue.Queue[tuple[int, bytes]] = queue.Queue()

    def frame(self, source: int, data: memoryview) -> None:
        self.frames.put((source, bytes(data)))

    def lost(self, process: int) -> None:
        self.frames.put((process, b""))

    def joined(self, process: int) -> None:
        pass

    def closed(self, process: int) -> None:
        pass


def exchange(transport: Transport) -> None:
    """Exchange values with the neighbours; raise an error if one is wrong or does not come."""
    rank, size = transport.rank, transport.size
    inbox = _Inbox()
    windows = {one: Window(_WIDTH, torch.float32, one) for one in range(size)}
    transport.open(windows, {rank: torch.full((_WIDTH,), float(rank))}, inbox, StopToken())
    after, before = (rank + 1) % size, (rank - 1) % size
    transport.send(after, [b"from ", str(rank).encode()])
    try:
        source, data = inbox.frames.get(timeout=_PATIENCE_S)
    except queue.Empty:
        raise Late(f"no frame came from worker {before} within {_PATIENCE_S:g} s") from None
    if data == b"":
        raise PeerLost(source)
    _expect("the frame", (source, data), (before, f"from {before}".encode()))
    _expect("the read", finished(transport.read(after)).tolist(), [float(after)] * _WIDTH)
    mean = torch.tensor([float(rank)])
    finished(transport.all_reduce([mean], range(size)))
    _expect("the mean", mean.item(), (size - 1) / 2)
    _wait_for_all(transport)
    transport.close()


def finished(pending: Pending[T]) -> T:
    """Wait for an operation in this thread, and return its result."""
    if not pending.done and pending.settle is not None:
        pending.settle()
    over = threading.Event()
    pending.when_done(over.set)
    if not over.wait(_PATIENCE_S):
        raise Late(f"{pending.label} did not finish within {_PATIENCE_S:g} s")
    return pending.result()


def _wait_for_all(transport: Transport) -> None:
    """Wait for all workers, so that none closes while another still reads."""
    transport.store.add("exchange/done", 1)
    until = time.monotonic() + _PATIENCE_S
    while transport.store.add("exchange/done", 0) < transport.size:
        if time.monotonic() > until:
            raise Late(f"not all workers were done within {_PATIENCE_S:g} s")
        time.sleep(0.01)


def _expect(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise Error(f"{what} brought {got!r} instead of {expected!r}")


def main() -> None:
    transport = connect()
    if transport is None:
        raise ConfigurationError("an exchange needs at least two workers; use `gossamer run -n 2`")
    exchange(transport)
    print(f"exchanged over {transport.name}: worker {transport.rank} of {transport.size}")


if __name__ == "__main__":
    try:
        main()
    except Error as error:
        sys.exit(f"error: {error}")
