"""The messages between the processes of a probe: requests and answers as JSON, pings, and bulk.

The receiving thread answers pings and bulk, as it does for a method's servers, so that a worker can
be measured whatever it is doing.
"""

from __future__ import annotations

import json
import threading
import time
from queue import Empty, SimpleQueue
from typing import Any

import torch

from gossamer.errors import Late, PeerLost
from gossamer.real.transports.transport import Stopped, StopToken, Transport, Window

PATIENCE_S = 60.0
"""How many seconds an answer may be late."""
_WORDS, _PING, _BULK, _ECHO = (bytes([kind]) for kind in range(4))


class ProbeChannel:
    """The listener of one process's transport."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport = transport
        self._stop = StopToken()
        self._words = {rank: SimpleQueue[dict[str, Any]]() for rank in range(self.size)}
        self._echoes = {rank: SimpleQueue[None]() for rank in range(self.size)}
        self._lost: list[int] = []

    def open(self) -> None:
        windows = {rank: Window(1, torch.float32, rank) for rank in range(self.size)}
        # Without a limit all workers would wait for one that ended before it came here.
        enough = threading.Timer(PATIENCE_S, self._stop.set)
        enough.daemon = True
        enough.start()
        try:
            self._transport.open(windows, {self.rank: torch.zeros(1)}, self, self._stop)
        except Stopped:
            raise Late(
                f"not all {self.size} workers have met within {PATIENCE_S:.0f} s; see that all "
                "were started, and that their hosts reach each other"
            ) from None
        finally:
            enough.cancel()

    def close(self) -> None:
        self._stop.set()
        self._transport.close()

    # ------------------------------------------------------------------ receiving

    def frame(self, source: int, data: memoryview) -> None:
        kind = bytes(data[:1])
        if kind == _WORDS:
            self._words[source].put(json.loads(bytes(data[1:])))
        elif kind == _ECHO:
            self._echoes[source].put(None)
        else:
            try:
                self._transport.send(source, [_ECHO])
            except PeerLost:
                pass  # the sender is gone, so nobody waits for the echo

    def lost(self, process: int) -> None:
        self._lost.append(process)

    def joined(self, process: int) -> None:
        pass

    def closed(self, process: int) -> None:
        pass

    def check(self) -> None:
        """Raise if a worker was lost, as a probe needs all of them."""
        if self._lost:
            raise PeerLost(self._lost[0])

    # ------------------------------------------------------------------ requests and answers

    def tell(self, to: int, words: dict[str, Any]) -> None:
        self._transport.send(to, [_WORDS, json.dumps(words).encode()])

    def hear(self, source: int, seconds: float | None = None) -> dict[str, Any]:
        """The next request or answer of a process; without `seconds` it may take any time."""
        return self._take(self._words[source], source, seconds)

    # ------------------------------------------------------------------ measuring

    def ping(self, peer: int) -> float:
        """The seconds of one round trip."""
        began = time.perf_counter()
        self._transport.send(peer, [_PING])
        self.wait_for_echo(peer)
        return time.perf_counter() - began

    def transfer(self, peer: int, bulk: bytes) -> float:
        """The seconds until the peer has confirmed the whole message."""
        began = time.perf_counter()
        self.start_transfer(peer, bulk)
        self.wait_for_echo(peer)
        return time.perf_counter() - began

    def start_transfer(self, peer: int, bulk: bytes) -> None:
        self._transport.send(peer, [_BULK, bulk])

    def wait_for_echo(self, peer: int) -> None:
        self._take(self._echoes[peer], peer, PATIENCE_S)

    def _take(self, box: SimpleQueue[Any], source: int, seconds: float | None) -> Any:
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                return box.get(timeout=StopToken.patience)
            except Empty:
                self.check()
                if until is not None and time.monotonic() > until:
                    raise Late(
                        f"worker {source} has not answered worker {self.rank} for {seconds:.0f} s; "
                        "see that its host is up and not overloaded"
                    ) from None
