"""Messages wait here for receives and receives for messages, in both worlds and in any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.worker import Message, Tag


class Receive(Pending[Any]):
    """A receive ends once: by a message, by a failure or by `cancel`. Its mailbox decides which
    came first, because a message given to a receive that has ended would be lost."""

    __slots__ = ("place",)

    def __init__(self, label: str, peer: int | None = None) -> None:
        """It takes messages from this peer only, or from anybody."""
        super().__init__(label, peer)
        self.place: tuple[Mailbox, Tag] | None = None
        """The mailbox where it was posted, and the tag. The mailbox forgets a receive that has
        ended, so that the message is freed with its last user."""

    def _is_withdrawn(self) -> bool:
        return self.place is None or self.place[0].withdraw(self.place[1], self)

    def fail(self, error: BaseException) -> None:
        if self._is_withdrawn():
            super().fail(error)

    def cancel(self) -> None:
        if self._is_withdrawn():
            super().cancel()


class Reply(Receive):
    """The receive of an answer, whose result is the payload alone."""

    __slots__ = ()

    def resolve(self, value: Message) -> None:
        super().resolve(value.payload)


class Mailbox:
    """The messages of one worker or server by tag, first come, first served.

    A receive is resolved outside of the lock, because the code that waits for it continues in the
    same thread and may use the mailbox again.
    """

    def __init__(self, *, is_of_server: bool = False) -> None:
        """Only the mailbox of a server supports `quiet`."""
        self._is_of_server = is_of_server
        self._lock = threading.Lock()
        self._arrived: dict[Tag, deque[Message]] = {}
        self._posted: dict[Tag, list[Receive]] = {}
        self._handing_over = 0
        """How many messages threads are giving to receives, including the code that this
        resumes."""
        self._until_quiet: list[Pending[None]] = []

    def deliver(self, tag: Tag, message: Message) -> Receive | None:
        """Give the message to the first receive that waits for it, and return that receive."""
        with self._lock:
            posted = self._posted.get(tag, ())
            receive = next((r for r in posted if r.peer in (None, message.source)), None)
            if receive is None:
                self._arrived.setdefault(tag, deque()).append(message)
                return None
            self._remove(tag, receive)
            self._handing_over += self._is_of_server
        try:
            receive.resolve(message)
        finally:
            if self._is_of_server:
                self._handed_over()
        return receive

    def _handed_over(self) -> None:
        with self._lock:
            self._handing_over -= 1
            if self._handing_over or not self._until_quiet:
                return
            waiting, self._until_quiet = self._until_quiet, []
        for pending in waiting:
            pending.resolve(None)

    def quiet(self) -> Pending[None]:
        """Resolves when the server has handled all messages that were delivered so far.

        This may happen in another thread than that which delivered a message: a reader continues in
        the thread that woke it as long as there are messages.
        """
        pending: Pending[None] = Pending("flush")
        with self._lock:
            if self._handing_over:
                self._until_quiet.append(pending)
                return pending
        pending.resolve(None)
        return pending

    def _remove(self, tag: Tag, receive: Receive) -> None:
        self._posted[tag].remove(receive)
        if not self._posted[tag]:
            # Tags contain step numbers, so the number of empty lists would grow.
            del self._posted[tag]

    def receive(self, tag: Tag, receive: Receive) -> None:
        """Take a message that has arrived, or wait for one."""
        with self._lock:
            message = self._take_arrived(tag, receive.peer) if tag in self._arrived else None
            if message is None:
                receive.place = (self, tag)
                self._posted.setdefault(tag, []).append(receive)
        if message is not None:
            receive.resolve(message)

    def _take_arrived(self, tag: Tag, source: int | None) -> Message | None:
        arrived = self._arrived[tag]
        for position, message in enumerate(arrived):
            if source is None or source == message.source:
                del arrived[position]
                if not arrived:
                    del self._arrived[tag]
                return message
        return None

    def withdraw(self, tag: Tag, receive: Receive) -> bool:
        """Whether the receive was still waiting; otherwise a message came first."""
        with self._lock:
            is_there = receive in self._posted.get(tag, ())
            if is_there:
                self._remove(tag, receive)
            return is_there

    def fail_lost(self, why_lost: Callable[[Receive], str | None]) -> None:
        """Fail the receives whose peer is lost; `why_lost` gives the reason, or None."""
        with self._lock:
            waiting = [receive for posted in self._posted.values() for receive in posted]
        for receive in waiting:
            if receive.peer is not None and (reason := why_lost(receive)) is not None:
                receive.fail(PeerLost(receive.peer, reason))

    def collect(self, tag: Tag) -> list[Message]:
        if tag not in self._arrived:
            return []
        with self._lock:
            return list(self._arrived.pop(tag, ()))
