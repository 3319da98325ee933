"""The links of one process over Gloo. Each has a receiving thread, and its sends never wait.

These things travel on the connection of one direction, in this order:

    message      It has up to SLOT bytes and tag 0: kind, length of the head, tag of the body or 0,
                 length of the body, number of messages acknowledged; then the head, and a short
                 body.
    body         A long body follows in pieces of PIECE bytes, under the tag that its message named.
    expected     The receiver has posted its receives already (`expect`), so the pieces of the body
    body         may go before their message or after it.

    FRAME         a frame for the listener
    LEAVE         the sender leaves; its own line in the log of departures made this epoch
    LEAVE_ANSWER  the LEAVE has arrived
    ACKNOWLEDGE   nothing but the number that every message carries
    16 and more   the messages of `one_sided` and `reduce`

A link at one of its two processes has these states:

    open --- leave() -----------> leaving --- LEAVE_ANSWER comes --> ended
     |                               |
     |--- LEAVE comes, is answered --+----------------------------> ended   (a close waits on)
     |--- the connection breaks -----+----------------------------> ended, and the peer is lost

Gloo has to know sizes in advance. So one receive of SLOT bytes is always posted, and a message
announces a longer body. More than one posted receive would be slower: Gloo tells the other side of
each, which wakes a thread there (an all-reduce of 0.8 MB took 2.1 ms with eight of them, 1.6 with
one). Waits have no deadline, because a wait that expires closes the pair for ever.

The caller's thread hands a send to Gloo at once. The memory is kept until the other side has
acknowledged the message.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.real.transports.buffers import joined_bytes, take
from gossamer.real.transports.torch.rendezvous import Lanes
from gossamer.real.transports.torch.wire import PIECE, SLOT, Receiver
from gossamer.real.transports.transport import Part, Parts

FRAME, LEAVE, LEAVE_ANSWER, ACKNOWLEDGE = range(4)
_HEAD = struct.Struct("<BxHIQQ")  # kind, length of the head, tag or 0, length, acknowledged
_POSTED = 6  # pieces awaited at once: enough that the sender always has somewhere to write
_UNACKED_MESSAGES = 16
_UNACKED_BYTES = 4 << 20
_TAGS = 1 << 24  # larger tags belong to rooms

_CUT_S = 1.0

_Piece = tuple[int, Tensor, Any]
"""The first byte of a piece, its memory, and the receive that was posted for it."""
_Sent = list[tuple[Any, Tensor]]
"""The sends of one message, each with the memory that Gloo may still be reading."""


class _Broken(Exception):
    """Gloo reports that the connection of the pair has ended."""


class Link:
    """This process's side of one pair: it sends on one connection and receives on another."""

    def __init__(
        self, outgoing: Any, incoming: Any, peer: int, receivers: Mapping[int, Receiver],
        frame: Callable[[int, memoryview], None], ended: Callable[[int, int, bool, int], None],
        at: int | None = None, life: int = 0,
    ) -> None:  # fmt: skip
        """`receivers` are found by the kind of a message. Gloo knows the peer by the number `at`,
        if that is another than its rank; `life` is the life of the peer that is linked."""
        self.peer = peer
        self.life = life
        self._at = peer if at is None else at
        self._outgoing = outgoing
        self._incoming = incoming
        self._receivers = receivers
        self._frame = frame
        self._ended = ended
        self._lock = threading.Lock()
        self._tag = self._room = 0
        self._rooms: dict[int, list[_Piece]] = {}
        """Receives of bodies that have a room, by tag. After a death some are never filled. They
        stay here, because Gloo could still write into them."""
        self._streams: dict[int, _Sent] = {}
        """By room: pieces that were sent before their message, which perhaps never follows."""
        self._unacked: deque[_Sent] = deque()
        self._released = 0
        self._acked = 0
        """How many messages of the other side this process has handled."""
        self._unacked_messages = 0
        self._unacked_bytes = 0
        self._is_leaving = False
        self._error: PeerLost | None = None
        self._thread = threading.Thread(
            target=self._receive_all, name=f"gossamer receives from {peer}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    # --- sending. All of it raises `PeerLost` where the process is gone.

    def send(self, parts: Parts) -> None:
        """Send a copy of one of the listener's frames."""
        length = sum(memoryview(part).nbytes for part in parts)
        if _HEAD.size + length <= SLOT:
            self._transmit(FRAME, b"", length, b"".join(parts))
        else:
            self._transmit(FRAME, b"", length, None, joined_bytes(parts).split(PIECE))

    def post(self, kind: int, head: bytes, body: Tensor | None = None) -> None:
        """Send a whole message. Nobody may change the body, which is flat bytes, any more."""
        length = 0 if body is None else body.numel()
        if body is None or _HEAD.size + len(head) + length <= SLOT:
            self._transmit(kind, head, length, b"" if body is None else _bytes(body))
        else:
            self._transmit(kind, head, length, None, body.split(PIECE))

    def begin(self, kind: int, head: bytes, length: int, room: int = 0) -> LinkStream:
        """Begin a message whose body of `length` bytes follows in pieces.

        With a room the message follows its last piece, so the stream may be left unfinished.
        Without a room the message goes first, and the receiver waits for the whole body.
        """
        sent: _Sent = []
        tag = room
        if not room and _HEAD.size + len(head) + length > SLOT:
            tag = self._transmit(kind, head, length, None, sent=sent)
        return LinkStream(self, sent, kind, head, length, tag)

    def expect(self, target: Tensor) -> int:
        """Make room for a body before it is sent, so that the sender need not announce it and wait.
        Returns the number of the room for the sender, or 0 if the body is too short for that."""
        if target.numel() <= SLOT:
            return 0
        with self._lock:
            self._room = self._room % _TAGS + 1
            room = _TAGS + self._room
        pieces = target.split(PIECE)
        try:
            posted = [self._await(piece, room) for piece in pieces]
        except _Broken:
            raise PeerLost(self.peer, "its connection broke") from None
        starts = range(0, target.numel(), PIECE)
        self._rooms[room] = list(zip(starts, pieces, posted, strict=True))
        return room

    def _transmit(
        self, kind: int, head: bytes, length: int, inline: Part | None,
        pieces: Iterable[Tensor] = (), room: int = 0, sent: _Sent | None = None,
    ) -> int:  # fmt: skip
        """Hand over a message and then the pieces of its body; return the tag of the pieces."""
        sent = [] if sent is None else sent
        with self._lock:
            tag = room
            if inline is None and not room:
                tag = self._tag = self._tag % _TAGS + 1
            self._unacked_messages = self._unacked_bytes = 0
            first = _HEAD.pack(kind, len(head), tag, length, self._acked)
            message = bytearray().join((first, head, inline or b""))
            self._unacked.append(sent)
            self._streams.pop(room, None)
            self._hand_over(sent, torch.frombuffer(message, dtype=torch.uint8), 0)
            for piece in pieces:
                self._hand_over(sent, piece, tag)
        return tag

    def _hand_over(self, sent: _Sent, content: Tensor, tag: int) -> None:
        if self._error is not None:
            raise self._error
        try:
            sent.append((self._outgoing.send([content], self._at, tag), content))
        except RuntimeError:
            self._error = PeerLost(self.peer, "its connection broke")
            raise self._error from None

    def push(
        self, sent: _Sent, kind: int, head: bytes, length: int, tag: int, piece: Tensor, left: int
    ) -> None:
        """Send the next piece of a stream, of whose body `left` bytes then remain."""
        if not tag:
            self.post(kind, head, piece)
            return
        has_room = tag > _TAGS
        if has_room:
            self._streams[tag] = sent
        self._hand_over(sent, piece, tag)
        if has_room and left == 0:
            self._transmit(kind, head, length, None, room=tag, sent=sent)

    def _release(self, acked: int) -> None:
        """The other side has handled these messages, so their memory is free."""
        while self._released < acked:
            self._released += 1
            for work, _ in self._unacked.popleft():
                _wait(work)

    # --- receiving

    def _receive_all(self) -> None:
        try:
            slot = torch.empty(SLOT, dtype=torch.uint8)
            message = _bytes(slot)
            work = self._await(slot, 0)
            while True:
                _wait(work)
                kind, width, tag, length, acked = _HEAD.unpack_from(message)
                at = _HEAD.size + width
                head = bytes(message[_HEAD.size : at])
                inline = None if tag else slot[at : at + length].clone()
                work = self._await(slot, 0)
                self._release(acked)
                if not self._handle(kind, head, tag, length, inline):
                    return
        except _Broken:
            self._end(is_lost=not self._is_leaving)

    def _await(self, target: Tensor, tag: int) -> Any:
        try:
            return self._incoming.recv([target], self._at, tag)
        except RuntimeError as error:
            raise _Broken from error

    def _handle(self, kind: int, head: bytes, tag: int, length: int, inline: Tensor | None) -> bool:
        """Return whether more is to come from this peer."""
        if kind == LEAVE:
            return self._answer_leave(int.from_bytes(head, "little"))
        if kind == LEAVE_ANSWER:
            self._end(is_lost=False)
            return False
        if kind == ACKNOWLEDGE:
            self._acked += 1
            return True
        if kind == FRAME:
            self._handle_frame(tag, length, inline)
        else:
            try:
                self._handle_message(kind, head, tag, length, inline)
            except PeerLost as lost:
                raise _Broken from lost  # the peer went before this process could answer
        self._acknowledge(length)
        return True

    def _handle_frame(self, tag: int, length: int, inline: Tensor | None) -> None:
        body = inline
        if body is None:
            body = take(length)
            for _ in self._pieces(tag, length, body):
                pass
        self._acked += 1
        self._frame(self.peer, _bytes(body))

    def _handle_message(
        self, kind: int, head: bytes, tag: int, length: int, inline: Tensor | None
    ) -> None:
        receiver = self._receivers[kind]
        has_place = length and tag <= _TAGS
        target = receiver.place(self.peer, kind, head, length) if has_place else None
        if inline is None:
            for start, piece in self._pieces(tag, length, target):
                receiver.piece(self.peer, kind, head, start, piece)
        elif length:
            if target is not None:
                target.copy_(inline)
                inline = target
            receiver.piece(self.peer, kind, head, 0, inline)
        self._acked += 1  # before `end`, which may send: the other side wants its memory back
        receiver.end(self.peer, kind, head)

    def _pieces(self, tag: int, length: int, target: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of a body as they arrive; the next receives are posted already."""
        posted = deque[_Piece](self._rooms.pop(tag, ()))
        ahead = length if tag > _TAGS else 0
        while ahead < length or posted:
            while ahead < length and len(posted) < _POSTED:
                size = min(PIECE, length - ahead)
                piece = take(size) if target is None else target[ahead : ahead + size]
                posted.append((ahead, piece, self._await(piece, tag)))
                ahead += size
            start, piece, work = posted.popleft()
            _wait(work)
            yield start, piece

    def _acknowledge(self, length: int) -> None:
        """Where all messages go one way, say from time to time how many have been handled."""
        self._unacked_messages += 1
        self._unacked_bytes += length
        if self._unacked_messages >= _UNACKED_MESSAGES or self._unacked_bytes >= _UNACKED_BYTES:
            with suppress(PeerLost):  # the receiving side will find out by itself
                self.post(ACKNOWLEDGE, b"")

    # --- the end

    def leave(self, epoch: int) -> None:
        """Say that this process leaves; the answer ends the receiving thread."""
        with self._lock:
            if self._is_leaving or self._error is not None:
                return
            self._is_leaving = True
        with suppress(PeerLost):  # the peer has left first
            self._transmit(LEAVE, epoch.to_bytes(8, "little"), 0, b"")

    def join(self, seconds: float) -> None:
        """Wait at most so long for the receiving thread to end."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def cut(self) -> None:
        """End the receiving thread, whatever the peer does: a thread that Gloo wakes while the
        interpreter takes itself apart aborts the process. A wait that expires closes the pair."""
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return
        with suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8)
            late = self._incoming.recv([nothing], self.peer, 2 * _TAGS + 1)
            late.wait(timedelta(milliseconds=1))
        self._thread.join(_CUT_S)

    def give_up(self, error: PeerLost) -> None:
        """From here on the process counts as gone, whatever its connection says."""
        self._error = error

    def _answer_leave(self, epoch: int) -> bool:
        with self._lock:
            is_leaving = self._is_leaving
            self._is_leaving = True  # this process need not say any more that it leaves
        with suppress(PeerLost):  # the peer did not wait for the answer
            self._transmit(LEAVE_ANSWER, b"", 0, b"")
        if is_leaving:
            return True  # the answer to our own LEAVE is still to come
        self._end(is_lost=False, epoch=epoch)
        return False

    def _end(self, is_lost: bool, epoch: int = 0) -> None:
        reason = "its connection broke" if is_lost else "it has left"
        if self._error is None:
            self._error = PeerLost(self.peer, reason)
        self._ended(self.peer, self.life, is_lost, epoch)


class LinkStream:
    """A body on its way to one peer, sent piece by piece as it comes into being."""

    def __init__(
        self, link: Link, sent: _Sent, kind: int, head: bytes, length: int, tag: int
    ) -> None:
        self._link = link
        self._message = (sent, kind, head, length, tag)
        self._left = length

    def push(self, piece: Tensor) -> None:
        """Send the next bytes: `PIECE` of them unless they are the last. Nobody may change them any
        more."""
        self._left -= piece.numel()
        self._link.push(*self._message, piece, self._left)


class Links:
    """The links to all other processes, by rank, and the frames that this process sends itself."""

    def __init__(
        self, rank: int, size: int, frame: Callable[[int, memoryview], None],
        ended: Callable[[int, int, bool, int], None],
    ) -> None:  # fmt: skip
        """`ended` is told which peer's link has ended, that of which life, whether it is lost, and
        its last epoch."""
        self.rank = rank
        self.size = size
        self.peers = [peer for peer in range(size) if peer != rank]
        self._frame = frame
        self._ended = ended
        self._links: dict[int, Link] = {}
        self._to_self: SimpleQueue[bytes | None] = SimpleQueue()

    def __getitem__(self, peer: int) -> Link:
        return self._links[peer]

    def open(self, lanes: Lanes | None, receivers: Sequence[tuple[range, Receiver]]) -> None:
        """Messages come in from now on; each receiver gets the kinds of its range. Without lanes no
        peer is there yet."""
        self._by_kind = {kind: receiver for kinds, receiver in receivers for kind in kinds}
        for number, peer in enumerate([] if lanes is None else lanes.ranks):
            if peer != self.rank and lanes is not None:
                self._links[peer] = self._link(lanes, peer, number, 0)
        threading.Thread(
            target=self._deliver_to_self, name="gossamer delivers to itself", daemon=True
        ).start()
        for link in self._links.values():
            link.start()

    def _link(self, lanes: Lanes, peer: int, at: int, life: int) -> Link:
        outgoing, incoming = lanes.towards(self.rank, peer), lanes.towards(peer, self.rank)
        return Link(
            outgoing, incoming, peer, self._by_kind, self._frame, self._ended, at, life
        )  # fmt: skip

    def add(self, lanes: Lanes, peer: int, life: int) -> Link:
        """A peer has come during the run. Its link is to be started."""
        link = self._links[peer] = self._link(lanes, peer, lanes.ranks.index(peer), life)
        return link

    def get(self, peer: int) -> Link | None:
        return self._links.get(peer)

    def close(self, epoch: int, seconds: float) -> None:
        """Tell all peers that this process leaves, and wait so long for their answers."""
        links = list(self._links.values())
        for link in links:
            link.leave(epoch)
        limit = time.monotonic() + seconds
        for link in links:
            link.join(max(0.0, limit - time.monotonic()))
        self._to_self.put(None)

    def cut(self) -> None:
        """End all receiving threads that still wait."""
        for link in self._links.values():
            link.cut()

    def send(self, to: int, parts: Parts) -> None:
        if to == self.rank:
            self._to_self.put(b"".join(parts))
        elif (link := self._links.get(to)) is None:
            raise PeerLost(to, "it has not come yet")
        else:
            link.send(parts)

    def _deliver_to_self(self) -> None:
        while (frame := self._to_self.get()) is not None:
            self._frame(self.rank, memoryview(frame))


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()  # an array is a buffer, whatever its annotations say
    return memoryview(array)


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _Broken from error
