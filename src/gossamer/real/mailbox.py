"""Where messages wait for receives, and receives for messages, across threads."""

from __future__ import annotations

import threading
from collections import deque

from gossamer.pending import Pending
from gossamer.worker import Message, Tag


class Mailbox:
    """One end's messages by tag, first come first served.

    A receive is resolved outside of the lock: what waits for it runs on in this very thread and may
    well come back here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: dict[Tag, deque[Message]] = {}
        self._posted: dict[Tag, list[tuple[int | None, Pending[Message]]]] = {}

    def deliver(self, tag: Tag, message: Message) -> None:
        with self._lock:
            pending = self._take_posted(tag, message.source)
            if pending is None:
                self._arrived.setdefault(tag, deque()).append(message)
        if pending is not None:
            pending.resolve(message)

    def _take_posted(self, tag: Tag, sender: int) -> Pending[Message] | None:
        posted = self._posted.get(tag, [])
        for position, (source, pending) in enumerate(posted):
            if (source is None or source == sender) and not pending.done:
                del posted[position]
                if not posted:
                    # Tags carry step numbers: what is used up must not pile up.
                    del self._posted[tag]
                return pending
        return None

    def receive(self, tag: Tag, source: int | None, pending: Pending[Message]) -> None:
        """Take a message that is there, or wait for one."""
        with self._lock:
            message = self._take_arrived(tag, source)
            if message is None:
                entry = (source, pending)
                self._posted.setdefault(tag, []).append(entry)
                pending.on_cancel = lambda: self._withdraw(tag, entry)
        if message is not None:
            pending.resolve(message)

    def _take_arrived(self, tag: Tag, source: int | None) -> Message | None:
        arrived = self._arrived.get(tag, deque())
        for position, message in enumerate(arrived):
            if source is None or source == message.source:
                del arrived[position]
                if not arrived:
                    del self._arrived[tag]
                return message
        return None

    def _withdraw(self, tag: Tag, entry: tuple[int | None, Pending[Message]]) -> None:
        with self._lock:
            posted = self._posted.get(tag, [])
            if entry in posted:
                posted.remove(entry)

    def collect(self, tag: Tag) -> list[Message]:
        with self._lock:
            return list(self._arrived.pop(tag, ()))
