"""The wire of one process: its links to all the others, and the frames that it sends to itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.real.transports.torch.link import Link
from gossamer.real.transports.torch.rendezvous import Lanes
from gossamer.real.transports.torch.wire import Receiver, Stream
from gossamer.real.transports.transport import Parts


class Links:
    """Sends to any process, and gives each message to the part that its kind belongs to."""

    def __init__(
        self, rank: int, size: int, frame: Callable[[int, memoryview], None],
        ended: Callable[[int, bool, int], None],
    ) -> None:  # fmt: skip
        """`ended` is told which peer's link has ended, whether it is lost, and its last epoch."""
        self.rank = rank
        self.size = size
        self.peers = [peer for peer in range(size) if peer != rank]
        self._frame = frame
        self._ended = ended
        self._receivers: list[tuple[range, Receiver]] = []
        self._links: dict[int, Link] = {}
        self._to_self: SimpleQueue[bytes | None] = SimpleQueue()

    def open(self, lanes: Lanes, receivers: Sequence[tuple[range, Receiver]]) -> None:
        """From now on messages come in; `receivers` are the parts, by the kinds of their own."""
        self._receivers = list(receivers)
        for peer in self.peers:
            outgoing, incoming = lanes.towards(self.rank, peer), lanes.towards(peer, self.rank)
            self._links[peer] = Link(outgoing, incoming, peer, self, self._frame, self._ended)
        threading.Thread(
            target=self._talk_to_self, name="gossamer talks to itself", daemon=True
        ).start()
        for link in self._links.values():
            link.start()

    def give_up(self, peer: int, error: PeerLost) -> None:
        """The process counts as gone, whatever its connection says."""
        self._links[peer].give_up(error)

    def close(self, epoch: int, seconds: float) -> None:
        """Say good-bye to all, and wait that long for their answers."""
        for link in self._links.values():
            link.leave(epoch)
        limit = time.monotonic() + seconds
        for link in self._links.values():
            link.join(max(0.0, limit - time.monotonic()))
        self._to_self.put(None)

    # --- sending

    def send(self, to: int, parts: Parts) -> None:
        if to == self.rank:
            self._to_self.put(b"".join(parts))
        else:
            self._links[to].send(parts)

    def expect(self, source: int, target: Tensor) -> int:
        return self._links[source].expect(target)

    def post(
        self, to: int, kind: int, head: bytes, body: Tensor | None = None, room: int = 0
    ) -> None:
        self._links[to].post(kind, head, body, room)

    def begin(self, to: int, kind: int, head: bytes, length: int, room: int = 0) -> Stream:
        return self._links[to].begin(kind, head, length, room)

    # --- called by the links' threads

    def place(self, source: int, kind: int, head: bytes, length: int) -> Tensor | None:
        return self._receiver_of(kind).place(source, kind, head, length)

    def piece(self, source: int, kind: int, head: bytes, start: int, data: Tensor) -> None:
        self._receiver_of(kind).piece(source, kind, head, start, data)

    def end(self, source: int, kind: int, head: bytes) -> None:
        self._receiver_of(kind).end(source, kind, head)

    def _receiver_of(self, kind: int) -> Receiver:
        return next(receiver for kinds, receiver in self._receivers if kind in kinds)

    def _talk_to_self(self) -> None:
        while (frame := self._to_self.get()) is not None:
            self._frame(self.rank, memoryview(frame))
