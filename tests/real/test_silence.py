"""Exchanges with those who do not answer at present."""

from __future__ import annotations

import pytest

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.real.silent_peers import Silence
from gossamer.real.transports.transport import StopToken


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def heard() -> tuple[Silence, Clock]:
    clock, stop = Clock(), StopToken()
    stop.set()  # the test looks by itself
    return Silence(stop, clock), clock


def exchange(silence: Silence, clock: Clock, peer: int, seconds: float) -> Pending[int]:
    """One that ends after so long, unless it is left out before."""
    started: Pending[int] = Pending("read", peer)
    shown = silence.bounded(peer, started)
    clock.now += seconds
    silence.look()
    started.resolve(peer)
    return shown


def test_who_does_not_answer_is_left_out_until_it_speaks(heard: tuple[Silence, Clock]) -> None:
    """Its late answer brings it back, and is not the method's any more."""
    silence, clock = heard
    started: Pending[int] = Pending("average", 1)
    shown = silence.bounded(1, started)
    silence.look()
    assert not shown.done
    clock.now += 5.0
    silence.look()
    silence.look()
    with pytest.raises(PeerLost, match="worker 1 is lost: it does not answer at present"):
        shown.result()
    assert silence.answering([0, 1, 2]) == [0, 2]
    started.resolve(1)
    assert silence.answering([0, 1, 2]) == [0, 1, 2]
    with pytest.raises(PeerLost):
        shown.result()


def test_a_death_ends_the_silence(heard: tuple[Silence, Clock]) -> None:
    """Of the dead the transport tells, in time or late."""
    silence, clock = heard
    for late in (0.0, 5.0):
        started: Pending[int] = Pending("read", 1)
        shown = silence.bounded(1, started)
        clock.now += late
        silence.look()
        started.fail(PeerLost(1))
        with pytest.raises(PeerLost):
            shown.result()
        assert silence.silent == frozenset()


def test_the_deadline_follows_the_usual_time_of_an_exchange(heard: tuple[Silence, Clock]) -> None:
    """Of each peer: a thin link is slow and not silent."""
    silence, clock = heard
    for _ in range(100):
        exchange(silence, clock, 1, 0.9)
        exchange(silence, clock, 2, 0.001)
    assert silence.limit(1) == pytest.approx(9.0)
    assert silence.limit(2) == 0.25
    assert exchange(silence, clock, 1, 8.0).result() == 1
    with pytest.raises(PeerLost):
        exchange(silence, clock, 2, 8.0).result()
    # A stop of a minute does not make the next one last for ten.
    exchange(silence, clock, 1, 60.0)
    assert silence.limit(1) < 40.0


def test_what_is_there_at_once_is_not_watched(heard: tuple[Silence, Clock]) -> None:
    """On shared memory every exchange is: it costs nothing there."""
    silence, _ = heard
    there = Pending.resolved("read", 1, 1)
    assert silence.bounded(1, there) is there
