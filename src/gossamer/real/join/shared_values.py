"""Values that the loops of all workers share: `worker.broadcast`, `worker.mean`, `worker.any`.

With a synchronous method all workers make these calls in the same order, so a number identifies
each. A worker asks every other one for what it said in the call of that number, and who comes later
answers when it gets there. Workers that have left their loops or died are left out. A worker may
die after some have heard it and before the others have, so all agree on whose values count.

With an asynchronous method nobody waits: a call sends its value to the others and uses what they
last sent.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError, PeerLost
from gossamer.payload import payload
from gossamer.pending import Pending
from gossamer.real.session import Session
from gossamer.real.transports.checked_values import numbers_from
from gossamer.worker import Message

_TAG = "shared value"
_LEFT = ""
"""The word of a worker that has left its loop and makes no more calls."""
WORDS = ("broadcast", "mean", "any")


@payload
@dataclass(frozen=True)
class SharedValue:
    """What one worker says in one call."""

    rank: int
    word: str
    name: str
    value: Any


class SharedValues:
    """One worker's part in the values that the loops share."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._number = 0
        """The number of this worker's last call."""
        self._has_ended = False
        self._own: dict[int, SharedValue] = {}
        """What this worker said in its last calls, by their numbers."""
        self._waiting: dict[int, list[Pending[SharedValue]]] = {}
        """The answers to workers that are a call ahead."""
        self._found: dict[int, dict[int, SharedValue]] = {}
        """What all said in the last calls, by number and rank."""
        self._last: dict[tuple[str, str], dict[int, list[Any]]] = {}
        """What each worker last sent; all that it sent since the last look, for `any`."""
        self._places: dict[tuple[str, str], str] = {}
        for word in WORDS:
            session.router.offer(f"worker.{word}", self._asked)
        session.router.offer("heard", self._heard)

    def call(self, word: str, name: str, value: Any, source: int, place: str) -> Any:
        """Make a call of one of the three words. `place` is where the loop calls it."""
        session = self._session
        if not 0 <= source < session.size:
            raise ConfigurationError(
                f"the source of worker.broadcast() must be a rank below {session.size}, got "
                f"{source}; worker.size says how many workers there are"
            )
        own = SharedValue(session.rank, word, name, _portable(word, value))
        if session.is_synchronous:
            found = self._matched(own)
            # Without the source, all must still get one value.
            speaker = source if source in found else min(found)
        else:
            found = self._latest(own, source, place)
            speaker = source if source in found else session.rank
        result = found[speaker][-1] if word == "broadcast" else _combined(word, found)
        is_on_device = isinstance(value, Tensor) and isinstance(result, Tensor)
        return result.to(value.device) if is_on_device else result

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

    def _matched(self, own: SharedValue) -> dict[int, list[Any]]:
        session = self._session
        with self._lock:
            self._number += 1
            number = self._number
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
        for other in said.values():
            if other.word != own.word:
                raise ConfigurationError(
                    f"worker {own.rank} called worker.{own.word}() where worker {other.rank} called"
                    f" worker.{other.word}(), as call {number} of these; let all workers make the"
                    " same calls in the same order"
                )
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

    def _latest(self, own: SharedValue, source: int, place: str) -> Mapping[int, list[Any]]:
        router, rank = self._session.router, self._session.rank
        key = (own.word, own.name)
        if self._places.setdefault(key, place) != place:
            raise ConfigurationError(
                f"worker.{own.word}() is called at {self._places[key]} and at {place}, and the "
                "workers of an asynchronous method could not tell the two apart; give each a name, "
                f"as in worker.{own.word}(value, name='loss')"
            )
        for message in router.mailboxes[rank].collect(_TAG):
            said: SharedValue = message.payload
            values = self._last.setdefault((said.word, said.name), {}).setdefault(said.rank, [])
            if said.word != "any":
                values.clear()
            values.append(said.value)
        if own.word != "broadcast" or rank == source:
            for other in sorted(router.live - {rank}):
                try:
                    router.post(other, _TAG, Message(rank, own))
                except PeerLost:
                    pass  # it has just died and needs no value
        last = self._last.setdefault(key, {})
        last[rank] = [own.value]
        heard = {one: last[one] for one in sorted(router.live) if one in last}
        for one in heard:
            last[one] = last[one][-1:]
        return heard


def _portable(word: str, value: Any) -> Any:
    """A copy of the value that can travel."""
    if word == "any":
        return bool(value)
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if word == "mean":
        return float(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigurationError(
        f"worker.broadcast() takes a tensor, a number or a string, got a {type(value).__name__}"
    )


def _combined(word: str, found: Mapping[int, list[Any]]) -> Any:
    """Whether anybody said so, or the mean of what all said last."""
    if word == "any":
        return any(any(values) for values in found.values())
    values = [values[-1] for values in found.values()]
    if not any(isinstance(value, Tensor) for value in values):
        return sum(values) / len(values)
    shapes = {tuple(value.shape) if isinstance(value, Tensor) else None for value in values}
    if len(shapes) > 1:
        raise ConfigurationError(
            f"worker.mean() got values of several shapes ({shapes}); give it the same kind of value"
            " on all workers"
        )
    stacked = torch.stack(values)
    is_float = stacked.is_floating_point()
    return (stacked if is_float else stacked.to(torch.get_default_dtype())).mean(0)
