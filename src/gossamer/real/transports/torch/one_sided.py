"""One-sided operations by messages: the owner's receiving thread answers for the owner's windows.

The owner never has to call anything. Its receiving thread answers while the owner computes, under
the same guard that keeps the owner's own changes whole. An average travels as deltas, piece by
piece, so the sum of both windows is kept whatever both processes add in the meantime.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from threading import RLock
from typing import Any, cast

from torch import Tensor

from gossamer.errors import PeerLost, ProtocolError
from gossamer.pending import Pending
from gossamer.real.transports.buffers import take_elements
from gossamer.real.transports.torch.links import Links, LinkStream
from gossamer.real.transports.torch.wire import PIECE, host_copy, raw
from gossamer.real.transports.transport import Window

READ, READ_ANSWER, ADD, ADD_ANSWER, AVERAGE, AVERAGE_ANSWER = range(16, 22)
KINDS = range(16, 32)
_ASK = struct.Struct("<QIQ")  # request, end, first element or the room made for the answer
_ANSWER = struct.Struct("<Q")


@dataclass
class _OneSidedRequest:
    """A request to another process that is not answered yet."""

    peer: int
    pending: Pending[Any]
    target: Tensor | None = None
    """The memory for a value that is read."""
    own: int = -1
    """The end of this process that an average changes."""


class OneSidedByMessages:
    """The windows of this process, and the operations on those of the others."""

    def __init__(
        self, links: Links, windows: Mapping[int, Window], initial: Mapping[int, Tensor]
    ) -> None:
        self._links = links
        self._windows = windows
        self._own = {end: host_copy([value]) for end, value in initial.items()}
        self._guards = {end: cast(AbstractContextManager[None], RLock()) for end in self._own}
        self._requests: dict[int, _OneSidedRequest] = {}
        self._numbers = count()
        self._answers: dict[tuple[int, int], LinkStream] = {}
        self._gone: dict[int, PeerLost] = {}

    def window(self, end: int) -> Tensor:
        return self._own[end]

    def guard(self, end: int) -> AbstractContextManager[None]:
        return self._guards[end]

    def read(self, end: int) -> Pending[Tensor]:
        pending: Pending[Tensor] = Pending("read", end)
        if end in self._own:
            pending.resolve(self._own[end])
            return pending
        there = self._windows[end]
        target = take_elements(there.numel, there.dtype)
        if self._links.get(there.process) is None:
            return Pending.failed("read", PeerLost(end, "it has not come yet"), end)
        number = self._ask(_OneSidedRequest(there.process, pending, target))
        try:
            room = self._links[there.process].expect(raw(target))
        except PeerLost as lost:
            self._give_up(number, lost)
        else:
            self._send(number, there.process, READ, _ASK.pack(number, end, room), None)
        return pending

    def accumulate(self, end: int, delta: Tensor, start: int = 0) -> Pending[None]:
        pending: Pending[None] = Pending("accumulate", end)
        there = self._windows[end]
        if start < 0 or start + delta.numel() > there.numel:
            raise ProtocolError(
                f"{delta.numel()} elements from {start} on do not fit window {end} of "
                f"{there.numel}; pass a part that lies within it"
            )
        if end in self._own:
            with self._guards[end]:
                mine = self._own[end][start : start + delta.numel()]
                mine.add_(delta.detach().reshape(-1).to(mine))
            pending.resolve(None)
            return pending
        number = self._ask(_OneSidedRequest(there.process, pending))
        body = raw(host_copy([delta.to(there.dtype)]))
        self._send(number, there.process, ADD, _ASK.pack(number, end, start), body)
        return pending

    def average(self, own: int, peer: int) -> Pending[None]:
        pending: Pending[None] = Pending("average", peer)
        mine, there = self._own[own], self._windows[peer]
        if (mine.numel(), mine.dtype) != (there.numel, there.dtype):
            raise ProtocolError(
                f"window {own} ({mine.numel()} of {mine.dtype}) cannot be averaged with window "
                f"{peer} ({there.numel} of {there.dtype}); average windows of one kind"
            )
        if peer in self._own:
            first, second = sorted((own, peer))
            with self._guards[first], self._guards[second]:
                half = (self._own[peer] - mine).mul_(0.5)
                mine.add_(half)
                self._own[peer].sub_(half)
            pending.resolve(None)
            return pending
        number = self._ask(_OneSidedRequest(there.process, pending, own=own))
        head = _ASK.pack(number, peer, 0)
        try:
            self._send_window(there.process, AVERAGE, head, own)
        except PeerLost as lost:
            self._give_up(number, lost)
        return pending

    def lost(self, process: int, error: PeerLost) -> None:
        """That process will answer no request any more."""
        self._gone[process] = error
        for number, request in list(self._requests.items()):
            if request.peer == process:
                self._give_up(number, error)

    def returned(self, process: int) -> None:
        """Another life of that process answers again."""
        self._gone.pop(process, None)
        for source, number in list(self._answers):
            if source == process:
                del self._answers[source, number]

    # --- receiving

    def place(self, source: int, kind: int, head: bytes, length: int) -> Tensor | None:
        if kind == READ_ANSWER:
            request = self._requests.get(_ANSWER.unpack(head)[0])
            return None if request is None or request.target is None else raw(request.target)
        if kind == AVERAGE:
            number = _ASK.unpack(head)[0]
            answer = self._links[source].begin(AVERAGE_ANSWER, _ANSWER.pack(number), length)
            self._answers[source, number] = answer
        return None

    def piece(self, source: int, kind: int, head: bytes, start: int, data: Tensor) -> None:
        if kind == ADD:
            _, end, first = _ASK.unpack(head)
            mine, theirs = self._part(end, first, start, data)
            with self._guards[end]:
                mine.add_(theirs)
        elif kind == AVERAGE:
            number, end, first = _ASK.unpack(head)
            mine, theirs = self._part(end, first, start, data)
            with self._guards[end]:
                # `pair_delta` without its halving, which each side does while it adds.
                mine.add_(theirs.sub_(mine), alpha=0.5)
            # The memory of their value now holds the difference, so nothing is copied.
            self._answers[source, number].push(data)
        elif kind == AVERAGE_ANSWER:
            request = self._requests.get(_ANSWER.unpack(head)[0])
            if request is not None:
                mine, difference = self._part(request.own, 0, start, data)
                with self._guards[request.own]:
                    mine.sub_(difference, alpha=0.5)

    def end(self, source: int, kind: int, head: bytes) -> None:
        if kind == READ:
            number, end, room = _ASK.unpack(head)
            self._send_window(source, READ_ANSWER, _ANSWER.pack(number), end, room)
        elif kind == ADD:
            self._links[source].post(ADD_ANSWER, _ANSWER.pack(_ASK.unpack(head)[0]))
        elif kind == AVERAGE:
            del self._answers[source, _ASK.unpack(head)[0]]
        else:
            request = self._requests.pop(_ANSWER.unpack(head)[0], None)
            if request is not None:
                request.pending.resolve(request.target)

    # --- inside

    def _part(self, end: int, first: int, start: int, data: Tensor) -> tuple[Tensor, Tensor]:
        window = self._own[end]
        theirs = data.view(window.dtype)
        at = first + start // window.element_size()
        return window[at : at + theirs.numel()], theirs

    def _send_window(self, to: int, kind: int, head: bytes, end: int, room: int = 0) -> None:
        """Send a window of this process without a copy. A reader may see old and new elements, as
        in shared memory. For an average both sides use the same difference."""
        content = raw(self._own[end])
        stream = self._links[to].begin(kind, head, content.numel(), room)
        for piece in content.split(PIECE):
            stream.push(piece)

    def _ask(self, request: _OneSidedRequest) -> int:
        number = next(self._numbers)
        self._requests[number] = request
        return number

    def _send(self, number: int, to: int, kind: int, head: bytes, body: Tensor | None) -> None:
        try:
            self._links[to].post(kind, head, body)
        except PeerLost as lost:
            self._give_up(number, lost)
        if to in self._gone:  # the process may have gone between `_ask` and here
            self._give_up(number, self._gone[to])

    def _give_up(self, number: int, error: PeerLost) -> None:
        request = self._requests.pop(number, None)
        if request is not None:
            request.pending.fail(error)
