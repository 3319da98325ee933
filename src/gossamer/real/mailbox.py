"""Where messages wait for receives, and receives for messages, across threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.worker import Message, Tag


class Receive(Pending[Message]):
    """A receive that is given a message or is cancelled: its mailbox decides which came first.

    A message that went to one already cancelled would be in nobody's hands.
    """

    __slots__ = ("place", "source")

    def __init__(self, label: str, peer: int | None = None, *, source: int | None = None) -> None:
        super().__init__(label, peer)
        self.source = source
        """Whose messages it takes; None: anybody's."""
        self.place: tuple[Mailbox, Tag] | None = None
        """Where it was posted. Nothing there refers to it afterwards, so that what it received goes
        with its last user."""

    def cancel(self) -> None:
        if self.place is not None and self.place[0].withdraw(self.place[1], self):
            super().cancel()

    def content(self) -> Pending[Any]:
        """The payload alone of what arrives."""
        found: Pending[Any] = Pending(self.label, self.peer)

        def arrived() -> None:
            try:
                found.resolve(self.result().payload)
            except PeerLost as lost:
                found.fail(lost)

        self.when_done(arrived)
        return found


class Mailbox:
    """One end's messages by tag, first come first served.

    A receive is resolved outside of the lock: what waits for it runs on in this very thread and may
    well come back here.
    """

    def __init__(self, *, is_of_server: bool = False) -> None:
        """Of a server it can be asked when what came so far has been dealt with."""
        self._is_of_server = is_of_server
        self._lock = threading.Lock()
        self._arrived: dict[Tag, deque[Message]] = {}
        self._posted: dict[Tag, list[Receive]] = {}
        self._handing_over = 0
        """Messages that threads are giving to receives, with all that this sets going."""
        self._until_quiet: list[Pending[None]] = []

    def deliver(self, tag: Tag, message: Message) -> None:
        with self._lock:
            pending = self._take_posted(tag, message.source) if tag in self._posted else None
            if pending is None:
                self._arrived.setdefault(tag, deque()).append(message)
                return
            self._handing_over += self._is_of_server
        try:
            pending.resolve(message)
        finally:
            if self._is_of_server:
                self._handed_over()

    def _handed_over(self) -> None:
        with self._lock:
            self._handing_over -= 1
            if self._handing_over or not self._until_quiet:
                return
            waiting, self._until_quiet = self._until_quiet, []
        for pending in waiting:
            pending.resolve(None)

    def quiet(self) -> Pending[None]:
        """There when what was delivered so far has been dealt with by whoever receives it here.

        Another thread than that of a message's sender may be at it: its reader goes on in the
        thread that woke it, for as long as there is something to take.
        """
        pending: Pending[None] = Pending("flush")
        with self._lock:
            if self._handing_over:
                self._until_quiet.append(pending)
                return pending
        pending.resolve(None)
        return pending

    def _take_posted(self, tag: Tag, sender: int) -> Receive | None:
        for pending in self._posted[tag]:
            if pending.source is None or pending.source == sender:
                self._remove(tag, pending)
                return pending
        return None

    def _remove(self, tag: Tag, pending: Receive) -> None:
        self._posted[tag].remove(pending)
        if not self._posted[tag]:
            # Tags carry step numbers: what is used up must not pile up.
            del self._posted[tag]

    def receive(self, tag: Tag, pending: Receive) -> None:
        """Take a message that is there, or wait for one."""
        with self._lock:
            message = self._take_arrived(tag, pending.source) if tag in self._arrived else None
            if message is None:
                pending.place = (self, tag)
                self._posted.setdefault(tag, []).append(pending)
        if message is not None:
            pending.resolve(message)

    def _take_arrived(self, tag: Tag, source: int | None) -> Message | None:
        arrived = self._arrived[tag]
        for position, message in enumerate(arrived):
            if source is None or source == message.source:
                del arrived[position]
                if not arrived:
                    del self._arrived[tag]
                return message
        return None

    def withdraw(self, tag: Tag, pending: Receive) -> bool:
        """Unless a message was quicker."""
        with self._lock:
            is_there = pending in self._posted.get(tag, ())
            if is_there:
                self._remove(tag, pending)
            return is_there

    def lose(self, ends: Collection[int]) -> None:
        """These ends are dead: whoever waits for one of them waits in vain."""
        self._fail(lambda pending: pending.peer in ends, "it died")

    def expect_no_more(self, end: int) -> None:
        """That worker sends no messages of its own any more; it answers what it is asked."""
        self._fail(lambda p: p.source == end and p.label == "receive", "it has left its loop")

    def _fail(self, is_vain: Callable[[Receive], bool], reason: str) -> None:
        with self._lock:
            vain = [
                (tag, pending, pending.peer)
                for tag, posted in self._posted.items()
                for pending in posted
                if pending.peer is not None and is_vain(pending)
            ]
            for tag, pending, _ in vain:
                self._remove(tag, pending)
        for _, pending, peer in vain:
            pending.fail(PeerLost(peer, reason))

    def collect(self, tag: Tag) -> list[Message]:
        if tag not in self._arrived:
            return []
        with self._lock:
            return list(self._arrived.pop(tag, ()))
