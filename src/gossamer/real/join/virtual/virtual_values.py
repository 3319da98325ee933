"""The values that the loops of simulated workers share, which the coordinator passes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.payload import decode, encode
from gossamer.real.join.shared_values import SharedValue, SharedValues
from gossamer.real.join.virtual.virtual_session import VirtualSession
from gossamer.script.channel import Said


class VirtualValues(SharedValues):
    """With a synchronous method the coordinator answers when all have made the call."""

    def __init__(self, session: VirtualSession) -> None:
        super().__init__(session.rank, session.size, is_synchronous=session.is_synchronous)
        self._session = session

    def _ask(self, own: SharedValue, **values: Any) -> Said:
        told = {"word": own.word, "name": own.name, **values}
        self._session.say("share", told, encode(own))
        return self._session.next("shared")

    def _matched(self, own: SharedValue, place: str) -> Mapping[int, list[Any]]:
        said = _values_of(self._ask(own, place=place))
        self._check_words(own, said)
        return {one.rank: [one.value] for one in said}

    def _exchange(
        self, own: SharedValue, *, is_heard: bool
    ) -> tuple[Sequence[SharedValue], Sequence[int]]:
        answer = self._ask(own, is_heard=is_heard)
        return _values_of(answer), answer["live"]


def _values_of(said: Said) -> list[SharedValue]:
    found: list[SharedValue] = []
    at = 0
    for length in said["lengths"]:
        found.append(decode(said.raw[at : at + length]))
        at += length
    return found
