"""Several sums of one group at once: what is begun when, and in which order they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from gossamer.errors import PeerLost
from gossamer.real.transports.torch.pipeline import Making, MakingGroup
from gossamer.real.transports.torch.reduction_state import UNDER_WAY, Order

pytestmark = pytest.mark.timeout(20)


@dataclass
class Sums:
    """A group whose sums wait until the test says that something has come."""

    told: SimpleQueue[tuple[str, int]] = field(default_factory=SimpleQueue[tuple[str, int]])
    added: list[threading.Event] = field(default_factory=list[threading.Event])
    came: list[threading.Event] = field(default_factory=list[threading.Event])
    broken: set[int] = field(default_factory=set[int])
    unwanted: set[int] = field(default_factory=set[int])
    errors: list[BaseException | None] = field(default_factory=list[BaseException | None])

    ready: threading.Event = field(default_factory=threading.Event)
    """Until it is set nothing is begun; what was asked for before is there by then."""

    def __post_init__(self) -> None:
        self.group = MakingGroup("Test", (3, 4), self._make, Sums.fulfil)

    def _make(self, members: tuple[int, ...]) -> Sums:
        _wait(self.ready)
        return self

    def ask(self, nbytes: int = 4, *, is_short: bool = False) -> int:
        number = len(self.added)
        self.added.append(threading.Event())
        self.came.append(threading.Event())

        def finished(error: BaseException | None) -> None:
            self.errors.append(error)
            self.told.put(("finished", number))

        value = torch.empty(nbytes, dtype=torch.uint8)
        target = torch.tensor([number, int(is_short)])
        self.group.ask(
            Order((3, 4), value, target, lambda: number not in self.unwanted, _land, finished)
        )
        return number

    def fulfil(self, order: Order) -> Making:
        number, is_short = map(int, order.target)
        self.told.put(("begun", number))
        try:
            yield
            _wait(self.added[number])
            if number in self.broken:
                raise RuntimeError("connection closed by peer")
        except GeneratorExit:
            self.told.put(("broken off", number))
            raise
        return None if is_short else _Rest(self, number)

    def next(self) -> tuple[str, int]:
        return self.told.get(timeout=10)


class _Rest:
    def __init__(self, sums: Sums, number: int) -> None:
        self._sums, self._number = sums, number

    def wait(self) -> None:
        _wait(self._sums.came[self._number])

    def give_up(self) -> None:
        self._sums.told.put(("given up", self._number))


def _wait(event: threading.Event) -> None:
    assert event.wait(10)


def _land(part: slice) -> None:
    """Nobody looks."""


@pytest.fixture
def sums() -> Iterator[Sums]:
    made = Sums()
    yield made
    made.ready.set()
    for event in (*made.added, *made.came):
        event.set()
    made.group.let_go(is_closing=True)
    made.group.join(time.monotonic() + 10)


def test_the_next_is_begun_while_others_are_waited_for(sums: Sums) -> None:
    """After one piece at most: the first thread looks between two."""
    sums.ready.set()
    first = sums.ask()
    assert sums.next() == ("begun", first)
    sums.added[first].set()
    second = sums.ask()
    assert sums.next() == ("begun", second)
    assert sums.told.empty()


def test_one_is_added_up_while_the_others_shares_of_another_are_missing(sums: Sums) -> None:
    first, second = sums.ask(), sums.ask()
    sums.ready.set()
    assert {sums.next(), sums.next()} == {("begun", first), ("begun", second)}
    for number in (first, second):
        sums.added[number].set()
    third = sums.ask()
    assert sums.next() == ("begun", third)
    for number in (second, first):
        sums.came[number].set()
    assert [sums.next(), sums.next()] == [("finished", first), ("finished", second)]


def test_a_short_sum_does_not_overtake_the_one_before(sums: Sums) -> None:
    """Others conclude from what is begun what has been finished; so that is done in order."""
    first, second = sums.ask(), sums.ask(is_short=True)
    for number in (first, second):
        sums.added[number].set()
    sums.ready.set()
    assert {sums.next(), sums.next()} == {("begun", first), ("begun", second)}
    time.sleep(0.02)
    assert sums.told.empty()
    sums.came[first].set()
    assert [sums.next(), sums.next()] == [("finished", first), ("finished", second)]


def test_nothing_is_begun_while_too_much_is_unfinished(sums: Sums) -> None:
    """Means are kept for those who may lack them, as long as that can be."""
    first, second, third = sums.ask(UNDER_WAY), sums.ask(1), sums.ask(1)
    for number in (first, second, third):
        sums.added[number].set()
    sums.ready.set()
    begun = {sums.next(), sums.next()}
    assert begun == {("begun", first), ("begun", second)}
    time.sleep(0.02)
    assert sums.told.empty()
    sums.came[first].set()
    assert [sums.next(), sums.next()] == [("finished", first), ("begun", third)]


def test_what_a_death_has_changed_is_broken_off(sums: Sums) -> None:
    first, second = sums.ask(), sums.ask()
    sums.ready.set()
    assert {sums.next(), sums.next()} == {("begun", first), ("begun", second)}
    sums.unwanted |= {first, second, 2}
    sums.added[first].set()
    sums.came[first].set()
    third = sums.ask()
    told = [sums.next() for _ in range(5)]
    assert ("broken off", second) in told
    assert ("begun", third) not in told
    assert {number for what, number in told if what == "finished"} == {first, second, third}


def test_a_failure_that_is_no_death_is_told_and_the_next_goes_on(
    sums: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.real.transports.torch.pipeline._GRACE_S", 0.01)
    sums.ready.set()
    first = sums.ask()
    sums.broken.add(first)
    sums.added[first].set()
    assert [sums.next(), sums.next()] == [("begun", first), ("finished", first)]
    (error,) = sums.errors
    assert isinstance(error, PeerLost)
    assert "Test's all-reduce failed: connection closed by peer" in str(error)
    second: Any = sums.ask()
    sums.added[second].set()
    sums.came[second].set()
    assert [sums.next(), sums.next()] == [("begun", second), ("finished", second)]
