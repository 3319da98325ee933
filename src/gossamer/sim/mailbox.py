"""Where messages wait for receives, and receives for messages."""

from __future__ import annotations

from collections import deque

from gossamer.pending import Pending
from gossamer.worker import Message, Tag


class Mailbox:
    """One end's messages by tag, first come first served."""

    __slots__ = ("_arrived", "_posted")

    def __init__(self) -> None:
        self._arrived: dict[Tag, deque[Message]] = {}
        self._posted: dict[Tag, list[tuple[int | None, Pending[Message]]]] = {}

    def deliver(self, tag: Tag, message: Message) -> Pending[Message] | None:
        """Hand it to who waits for it; gives back the receive that it ended."""
        posted = self._posted.get(tag)
        if posted:
            for position, (source, pending) in enumerate(posted):
                if source is None or source == message.source:
                    del posted[position]
                    if not posted:
                        # Tags carry step numbers: what is used up must not pile up.
                        del self._posted[tag]
                    pending.resolve(message)
                    return pending
        self._arrived.setdefault(tag, deque()).append(message)
        return None

    def receive(self, tag: Tag, source: int | None, pending: Pending[Message]) -> None:
        """Take a message that is there, or wait for one."""
        arrived = self._arrived.get(tag)
        if arrived:
            for position, message in enumerate(arrived):
                if source is None or source == message.source:
                    del arrived[position]
                    if not arrived:
                        del self._arrived[tag]
                    pending.resolve(message)
                    return
        entry = (source, pending)
        self._posted.setdefault(tag, []).append(entry)

        def withdraw() -> None:
            if entry in self._posted.get(tag, ()):
                self._posted[tag].remove(entry)

        pending.on_cancel = withdraw

    def collect(self, tag: Tag) -> list[Message]:
        return list(self._arrived.pop(tag, ()))
