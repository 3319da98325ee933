"""The values that the loops of real workers share.

With a synchronous method a worker asks every other one for what it said in the call of a number,
and who comes later answers when it gets there. Workers that have left their loops or died are left
out. A worker may die after some have heard it and before the others have, so all agree on whose
values count.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.real.join.shared_values import WORDS, SharedValue, SharedValues
from gossamer.real.session import Session
from gossamer.real.transports.checked_values import numbers_from
from gossamer.worker import Message

_TAG = "shared value"
_LEFT = ""
"""The word of a worker that has left its loop and makes no more calls."""


class ExchangedValues(SharedValues):
    """Values that travel by the session's router."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.rank, session.size, is_synchronous=session.is_synchronous)
        self._session = session
        self._lock = threading.Lock()
        self._has_ended = False
        self._own: dict[int, SharedValue] = {}
        """What this worker said in its last calls, by their numbers."""
        self._waiting: dict[int, list[Pending[SharedValue]]] = {}
        """The answers to workers that are a call ahead."""
        self._found: dict[int, dict[int, SharedValue]] = {}
        """What all said in the last calls, by number and rank."""
        for word in WORDS:
            session.router.offer(f"worker.{word}", self._asked)
        session.router.offer("heard", self._heard)

    def end(self) -> None:
        """This worker has left its loop: whoever waits for its next call need not."""
        with self._lock:
            self._has_ended = True
            waiting = [answer for answers in self._waiting.values() for answer in answers]
            self._waiting = {}
        for answer in waiting:
            answer.resolve(self._left())

    def _left(self) -> SharedValue:
        return SharedValue(self._session.rank, _LEFT, "", None)

    # ------------------------------------------------------------------ synchronous methods

    def _matched(self, own: SharedValue, place: str) -> Mapping[int, list[Any]]:
        session, number = self._session, self._number
        with self._lock:
            # Whoever made the call before last has heard everybody in it.
            self._own = {n: said for n, said in self._own.items() if n >= number - 1}
            self._found = {n: found for n, found in self._found.items() if n >= number - 1}
            self._own[number] = own
            waiting = self._waiting.pop(number, [])
        for answer in waiting:
            answer.resolve(own)
        others = sorted(session.router.members.training - {session.rank})
        asked = [(rank, f"worker.{own.word}", number) for rank in others]
        answers: list[SharedValue] = session.answers(asked)
        said = {one.rank: one for one in [own, *answers] if one.word != _LEFT}
        self._check_words(own, said.values())
        self._found[number] = said
        key = f"shared value {number}"
        agreed = session.store.agree(key, ",".join(map(str, sorted(said))))
        ranks = numbers_from(key, agreed, ",", session.size)
        for rank in ranks:
            if rank not in said:
                self._hear_from_others(number, rank)
        return {rank: [said[rank].value] for rank in ranks if rank in said}

    def _asked(self, number: int = 0) -> SharedValue | Pending[SharedValue]:
        """Answer a worker that has made the call of this number; in any thread."""
        with self._lock:
            if number in self._own:
                return self._own[number]
            if self._has_ended:
                return self._left()
            answer: Pending[SharedValue] = Pending("shared value")
            self._waiting.setdefault(number, []).append(answer)
            return answer

    def _hear_from_others(self, number: int, rank: int) -> None:
        """A worker has died when only some had heard it: ask them what it said."""
        session, about = self._session, number * self._session.size + rank
        others = sorted(session.router.live - {session.rank})
        for one in session.answers([(other, "heard", about) for other in others]):
            if one.word != _LEFT:
                self._found[number][rank] = one

    def _heard(self, about: int = 0) -> SharedValue:
        number, rank = divmod(about, self._session.size)
        return self._found.get(number, {}).get(rank, self._left())

    # ------------------------------------------------------------------ asynchronous methods

    def _exchange(
        self, own: SharedValue, *, is_heard: bool
    ) -> tuple[Sequence[SharedValue], Sequence[int]]:
        router, rank = self._session.router, self._rank
        said = [message.payload for message in router.mailboxes[rank].collect(_TAG)]
        for other in sorted(router.live - {rank}) if is_heard else ():
            try:
                router.post(other, _TAG, Message(rank, own))
            except PeerLost:
                pass  # it has just died and needs no value
        return said, sorted(router.live)
