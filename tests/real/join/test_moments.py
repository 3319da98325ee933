"""The first moments of a worker: nothing counted twice, nothing left out, and nobody else's."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.pending import Pending
from gossamer.real import moments as module
from gossamer.real.books import Books
from gossamer.real.moments import Moments, Segment


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found


def begun(workers: int = 2) -> Moments:
    moments = Moments(workers, Books())
    moments.begin(100.0)
    return moments


def exchange(moments: Moments, clock: Clock, seconds: float, peer: int = 1) -> None:
    with moments.exchanging("average", "with", peer):
        clock.now += seconds


def test_a_wait_is_cut_by_what_was_exchanged_inside_it(clock: Clock) -> None:
    """A side loop that exchanges while the worker waits takes its time out of the wait."""
    moments = begun()
    clock.now = 101.0
    exchange(moments, clock, 0.5)
    moments.waited(Pending("reply", 2), 100.0, 102.0)
    assert moments.segments == [
        (0.0, 1.0, "waiting", "reply from server 0"),
        (1.0, 1.5, "communicating", "average with worker 1"),
        (1.5, 2.0, "waiting", "reply from server 0"),
    ]


def test_a_call_inside_another_is_a_part_of_it(clock: Clock) -> None:
    """A broadcast sends to everybody, and is one exchange."""
    moments = begun()
    with moments.exchanging("broadcast", "from", 0):
        exchange(moments, clock, 0.25)
        exchange(moments, clock, 0.25)
    assert moments.segments == [(0.0, 0.5, "communicating", "broadcast from worker 0")]


def test_what_other_threads_exchange_is_not_this_worker_s_time(clock: Clock) -> None:
    """A thread that receives may answer for the worker, which computes meanwhile."""
    moments = begun()
    thread = threading.Thread(target=exchange, args=(moments, clock, 0.5))
    thread.start()
    thread.join()
    moments.computed(100.0, 100.5)
    assert moments.segments == [(0.0, 0.5, "computing", "")]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from("cew "), st.floats(0.001, 0.5)), min_size=1, max_size=400)
)
def test_the_moments_follow_each_other_without_gap_or_overlap(
    parts: list[tuple[str, float]],
) -> None:
    """Every moment up to the last one written down is said to be spent on exactly one thing."""
    books, clock = Books(), Clock()
    moments = Moments(2, books)
    moments.begin(100.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", clock)
        for kind, seconds in parts:
            began = clock.now
            if kind == "e":
                exchange(moments, clock, seconds)
                continue
            clock.now += seconds
            if kind == "c":
                moments.computed(began, clock.now)
            elif kind == "w":
                moments.waited(Pending("reply", 1), began, clock.now)
    found: list[Segment] = moments.segments
    assert all(end > start for start, end, _, _ in found)
    assert all(before[1] == after[0] for before, after in pairwise(found))
    assert not found or found[0][0] == 0.0
    booked = sum(seconds for kind, seconds in parts if kind == "w")
    assert sum(books.waiting.values()) == pytest.approx(booked)
