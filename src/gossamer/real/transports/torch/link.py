"""One pair of processes over Gloo: a thread that receives, and sends that never wait.

What travels, in order, on the connection of one direction:

    message      Up to SLOT bytes, tag 0: kind, length of the head, tag of the body or 0, length of
                 the body, number of messages acknowledged; then the head, and a short body.
    body         In pieces of PIECE bytes, under the tag that its message has named.
    body with    The receiver has made room, so its receives are posted already: the pieces may
    a room       go ahead of their message, or behind it.

    FRAME         a frame of the listener's
    LEAVE         good-bye, by the epoch of the sender's own line in the log of departures
    LEAVE_ANSWER  the good-bye has come
    ACKNOWLEDGE   nothing but the number that every message carries
    16 and more   the messages of `one_sided` and `reduce`

The states of a link, at one of its processes:

    open --- leave() -----------> leaving --- LEAVE_ANSWER comes --> ended
     |                               |
     |--- LEAVE comes, is answered --+----------------------------> ended   (`leave` waits on)
     |--- the connection breaks -----+----------------------------> ended, and the peer is lost

Gloo wants to know sizes beforehand. So a receive of SLOT bytes is always posted, and a longer body
is announced. One posted receive is better than several: each is told to the other side, which wakes
a thread there, and a sum of 0.8 MB took 2.1 ms with eight of them instead of 1.6. Waits have no
deadline: one that expired would close the pair for ever.

A send is handed to Gloo at once, in the caller's thread, and its memory is kept until the other
side has acknowledged the message.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.real.transports.buffers import take
from gossamer.real.transports.torch.wire import PIECE, SLOT, Receiver
from gossamer.real.transports.transport import Part, Parts

FRAME, LEAVE, LEAVE_ANSWER, ACKNOWLEDGE = range(4)
_HEAD = struct.Struct("<BxHIQQ")  # kind, length of the head, tag or 0, length, acknowledged
_POSTED = 6  # pieces awaited at once: enough that the sender always has somewhere to write
_UNACKED_MESSAGES = 16
_UNACKED_BYTES = 4 << 20
_TAGS = 1 << 24  # beyond are those of rooms

_Piece = tuple[int, Tensor, Any]
"""The first byte of a piece, its memory, and the receive that was posted for it."""


class _Broken(Exception):
    """Gloo reports that the pair's connection has ended."""


class _Sent:
    """A message whose memory Gloo may still be reading."""

    __slots__ = ("held", "works")

    def __init__(self) -> None:
        self.works: list[Any] = []
        self.held: list[Tensor] = []


class Link:
    """This process's side of one pair: it sends on one connection and receives on another."""

    def __init__(
        self, outgoing: Any, incoming: Any, peer: int, receiver: Receiver,
        frame: Callable[[int, memoryview], None], ended: Callable[[int, bool, int], None],
    ) -> None:  # fmt: skip
        self.peer = peer
        self._outgoing = outgoing
        self._incoming = incoming
        self._receiver = receiver
        self._frame = frame
        self._ended = ended
        self._lock = threading.Lock()
        self._tag = self._room = 0
        self._rooms: dict[int, list[_Piece]] = {}
        """Receives of bodies that have room, by tag. Those that nobody fills, after a death, stay:
        Gloo could still write into them."""
        self._streams: set[_Sent] = set()
        """Pieces that were sent ahead of their message."""
        self._unacked: deque[_Sent] = deque()
        self._released = 0
        self._acked = 0
        """Messages of the other side that have been handled here."""
        self._unacked_messages = 0
        self._unacked_bytes = 0
        self._is_leaving = False
        self._error: PeerLost | None = None
        self._thread = threading.Thread(
            target=self._receive_all, name=f"gossamer receives from {peer}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    # --- sending

    def send(self, parts: Parts) -> None:
        """One of the listener's frames, copied."""
        length = sum(_length(part) for part in parts)
        if _HEAD.size + length <= SLOT:
            self._transmit(FRAME, b"", length, b"".join(parts))
        else:
            self._transmit(FRAME, b"", length, None, _joined(parts, length).split(PIECE))

    def post(self, kind: int, head: bytes, body: Tensor | None = None, room: int = 0) -> None:
        length = 0 if body is None else body.numel()
        if body is None or _HEAD.size + len(head) + length <= SLOT:
            self._transmit(kind, head, length, b"" if body is None else _bytes(body))
        else:
            self._transmit(kind, head, length, None, body.split(PIECE), room)

    def begin(self, kind: int, head: bytes, length: int, room: int = 0) -> LinkStream:
        if room or _HEAD.size + len(head) + length <= SLOT:
            return LinkStream(self, _Sent(), kind, head, length, room)
        sent = _Sent()
        tag = self._transmit(kind, head, length, None, sent=sent)
        return LinkStream(self, sent, kind, head, length, tag)

    def expect(self, target: Tensor) -> int:
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
        """Hand over a message, and the pieces of its body behind it; the tag that they have."""
        sent = sent or _Sent()
        with self._lock:
            tag = room
            if inline is None and not room:
                tag = self._tag = self._tag % _TAGS + 1
            self._unacked_messages = self._unacked_bytes = 0
            first = _HEAD.pack(kind, len(head), tag, length, self._acked)
            message = bytearray().join((first, head, inline or b""))
            self._unacked.append(sent)
            self._streams.discard(sent)
            self.hand_over(sent, torch.frombuffer(message, dtype=torch.uint8), 0)
            for piece in pieces:
                self.hand_over(sent, piece, tag)
        return tag

    def hand_over(self, sent: _Sent, content: Tensor, tag: int) -> None:
        if self._error is not None:
            raise self._error
        try:
            sent.works.append(self._outgoing.send([content], self.peer, tag))
        except RuntimeError:
            self._error = PeerLost(self.peer, "its connection broke")
            raise self._error from None
        sent.held.append(content)

    def _release(self, acked: int) -> None:
        """The other side has handled these messages, so their memory is free."""
        while self._released < acked:
            self._released += 1
            for work in self._unacked.popleft().works:
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
            return self._incoming.recv([target], self.peer, tag)
        except RuntimeError as error:
            raise _Broken from error

    def _handle(self, kind: int, head: bytes, tag: int, length: int, inline: Tensor | None) -> bool:
        """Whether more is to come from this peer."""
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
                raise _Broken from lost  # it is gone before it could be answered
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
        receiver = self._receiver
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
        self._acked += 1  # before the end, which may send: the other side wants its memory
        receiver.end(self.peer, kind, head)

    def _pieces(self, tag: int, length: int, target: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """The pieces of a body as they arrive; some are posted ahead, so that none waits."""
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
            try:
                self.post(ACKNOWLEDGE, b"")
            except PeerLost:
                pass  # the receiving side will find out by itself

    # --- the end

    def leave(self, epoch: int) -> None:
        """Say good-bye; the answer ends the receiving thread."""
        with self._lock:
            if self._is_leaving or self._error is not None:
                return
            self._is_leaving = True
        try:
            self._transmit(LEAVE, epoch.to_bytes(8, "little"), 0, b"")
        except PeerLost:
            pass  # it has gone first

    def join(self, seconds: float) -> bool:
        """Whether the receiving thread has ended."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def give_up(self, error: PeerLost) -> None:
        """The process counts as gone, whatever its connection says."""
        self._error = error

    def _answer_leave(self, epoch: int) -> bool:
        with self._lock:
            is_leaving = self._is_leaving
            self._is_leaving = True  # so that we shall not say good-bye to nobody
        try:
            self._transmit(LEAVE_ANSWER, b"", 0, b"")
        except PeerLost:
            pass  # it did not wait for the answer
        if is_leaving:
            return True  # its answer to our own good-bye is still to come
        self._end(is_lost=False, epoch=epoch)
        return False

    def _end(self, is_lost: bool, epoch: int = 0) -> None:
        reason = "its connection broke" if is_lost else "it has left"
        if self._error is None:
            self._error = PeerLost(self.peer, reason)
        self._ended(self.peer, is_lost, epoch)

    # --- for streams

    def keep(self, sent: _Sent) -> None:
        """Keep pieces that go ahead of their message: perhaps it never follows."""
        self._streams.add(sent)

    def finish(self, sent: _Sent, kind: int, head: bytes, length: int, room: int) -> None:
        self._transmit(kind, head, length, None, room=room, sent=sent)


class LinkStream:
    """A body under way to one peer, under a tag of its own or inside of its message."""

    def __init__(
        self, link: Link, sent: _Sent, kind: int, head: bytes, length: int, tag: int
    ) -> None:
        self._link = link
        self._sent = sent
        self._message = (kind, head, length, tag)
        self._left = length

    def push(self, piece: Tensor) -> None:
        kind, head, length, tag = self._message
        if not tag:
            self._link.post(kind, head, piece)
            return
        if tag > _TAGS and self._left == length:
            self._link.keep(self._sent)
        self._link.hand_over(self._sent, piece, tag)
        self._left -= piece.numel()
        if tag > _TAGS and self._left == 0:
            self._link.finish(self._sent, kind, head, length, tag)


def _length(part: Part) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()  # an array is a buffer, whatever its annotations say
    return memoryview(array)


def _joined(parts: Parts, length: int) -> Tensor:
    whole = take(length)
    room, at = _bytes(whole), 0
    for part in parts:
        end = at + _length(part)
        room[at:end] = memoryview(part).cast("B")
        at = end
    return whole


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _Broken from error
