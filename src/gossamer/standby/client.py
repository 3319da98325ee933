"""A worker whose servers have standbys."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from gossamer.errors import Error, PeerLost
from gossamer.pending import Pending
from gossamer.standby.logged_server import SentAgain
from gossamer.worker import INBOX, Message, Tag, Worker

T = TypeVar("T")
_KEPT = 64
"""So many messages that ask for no answer are kept for the standby, until a later one is answered.
"""


@dataclass(slots=True, eq=False)
class _Sent:
    """A message to a server that its standby may need."""

    number: int
    payload: Any
    tag: Tag
    answer: Pending[Any] | None


class Client:
    """The `Worker` of a worker whose servers have standbys.

    Operations that concern no server are those of the worker itself.
    """

    def __init__(
        self, inner: Worker, has_text: bool, is_alive: Callable[[], bool] = lambda: True
    ) -> None:
        """`has_text` says that the servers run a text and log its messages; otherwise they are
        memory, and both are added to. In virtual time a life of a worker ends before the program.
        """
        self._is_alive = is_alive
        self._inner = inner
        self._has_text = has_text
        servers = list(inner.servers)
        self._standby = {server: server + len(servers) for server in servers}
        self._acting = {server: server for server in servers}
        self._count = dict.fromkeys(servers, 0)
        self._kept: dict[int, list[_Sent]] = {server: [] for server in servers}
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, to: int, payload: Any, *, tag: Tag) -> Pending[None]:
        if to not in self._standby:
            return self._inner.send(to, payload, tag=tag)
        self._post(to, payload, tag, None)
        return Pending.resolved("send", None, to)

    def request(self, to: int, payload: Any, *, tag: Tag) -> Pending[Any]:
        if to not in self._standby:
            return self._inner.request(to, payload, tag=tag)
        answer: Pending[Any] = Pending("reply", to)
        self._post(to, payload, tag, answer)
        return answer

    def collect(self, tag: Tag) -> list[Message]:
        """What a standby has sent counts as sent by its server."""
        return [self._as_known(message) for message in self._inner.collect(tag)]

    def _as_known(self, message: Message) -> Message:
        known = next((one for one, own in self._standby.items() if own == message.source), None)
        return message if known is None else dataclasses.replace(message, source=known)

    def _post(self, server: int, payload: Any, tag: Tag, answer: Pending[Any] | None) -> None:
        with self._lock:
            sent = _Sent(self._count[server], payload, tag, answer)
            self._count[server] += 1
            kept = self._kept[server]
            kept.append(sent)
            if len(kept) > _KEPT and kept[0].answer is None:
                del kept[0]
            end = self._acting[server]
        self._post_to(end, server, sent)

    def _post_to(self, end: int, server: int, sent: _Sent) -> None:
        if sent.answer is None:
            operation: Pending[Any] = self._inner.send(end, sent.payload, tag=sent.tag)
        else:
            operation = self._inner.request(end, sent.payload, tag=sent.tag)
        operation.when_done(lambda: self._ended(end, server, sent, operation))

    def _ended(self, end: int, server: int, sent: _Sent, operation: Pending[Any]) -> None:
        try:
            value = operation.result()
        except PeerLost:
            if not self._moved_from(end, server) and sent.answer is not None:
                sent.answer.fail(PeerLost(server))
        except Error as error:
            if sent.answer is not None:
                sent.answer.fail(error)
        else:
            if sent.answer is None:
                return
            with self._lock:
                # The server had everything that was sent before.
                self._kept[server] = [
                    one for one in self._kept[server]
                    if one is not sent and (one.answer is not None or one.number > sent.number)
                ]  # fmt: skip
            sent.answer.resolve(value)

    def _moved_from(self, end: int, server: int) -> bool:
        """Turn to the standby, and send it what has not been answered; False if it is dead, too."""
        with self._lock:
            if self._acting[server] != end or not self._is_alive():
                return True  # it was all sent when another operation failed, or nobody asks
            standby = self._standby[server]
            if end == standby:
                return False
            self._acting[server] = standby
            kept = list(self._kept[server])
            first = kept[0].number if kept else self._count[server]
        if self._has_text:
            self._inner.send(standby, SentAgain(first), tag=INBOX)
        for sent in kept:
            self._post_to(standby, server, sent)
        return True

    # ------------------------------------------------------------------ one-sided

    def read(self, peer: int) -> Pending[Tensor]:
        if peer not in self._standby:
            return self._inner.read(peer)
        result: Pending[Tensor] = Pending("read", peer)
        end = self._acting[peer]
        operation = self._inner.read(end)

        def ended() -> None:
            try:
                result.resolve(operation.result())
            except PeerLost:
                if not self._moved_from(end, peer) or not self._is_alive():
                    result.fail(PeerLost(peer))
                    return
                again = self.read(peer)
                again.when_done(lambda: _pass_on(again, result))
                if again.settle is not None and result.settle is not None:
                    again.settle()
            except Error as error:
                result.fail(error)

        result.settle = operation.settle
        operation.when_done(ended)
        return result

    def accumulate(self, peer: int, delta: Tensor, *, start: int = 0) -> Pending[None]:
        if peer not in self._standby:
            return self._inner.accumulate(peer, delta, start=start)
        ends = {self._acting[peer], self._standby[peer]}
        adds = [self._inner.accumulate(end, delta, start=start) for end in sorted(ends)]
        result: Pending[None] = Pending("accumulate", peer)

        def ended() -> None:
            if all(add.done for add in adds):
                _pass_on(next((add for add in adds if _is_made(add)), adds[0]), result)

        settles = [add.settle for add in adds if add.settle is not None]
        if settles:

            def settle() -> None:
                for one in settles:
                    one()

            result.settle = settle
        for add in adds:
            add.when_done(ended)
        return result


def _is_made(add: Pending[None]) -> bool:
    try:
        add.result()
    except Error:
        return False
    return True


def _pass_on(operation: Pending[T], result: Pending[T]) -> None:
    """Let the result end as the operation has."""
    try:
        result.resolve(operation.result())
    except Error as error:
        result.fail(error)
