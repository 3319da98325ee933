"""The first moments of a worker: nothing counted twice, nothing left out, and nobody else's."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.observe.run_observer import RunObserver
from gossamer.observe.strip import Strip
from gossamer.real import worker as module
from gossamer.real.worker import RealWorker, tell_operations

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 100_000 * MS

    def monotonic_ns(self) -> int:
        return self.now


class Operations:
    """A worker whose operations take as long as they are told to."""

    rank, size = 0, 2

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def average(self, peer: int, ms: int) -> None:
        self._clock.now += ms * MS

    def broadcast(self, value: None, *, root: int) -> None:
        cast(Any, self).average(1, 250)
        cast(Any, self).average(1, 250)

    send = request = reply = all_gather = all_reduce = read = accumulate = average


class Run:
    """One worker of two, observed from its beginning."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.began = self.clock.now
        monkeypatch.setattr(module, "time", self.clock)
        self._strip = Strip(2, most_segments=250)
        self._strip.begin(self.began)
        self.observer = RunObserver(2, [0], others=[self._strip])
        self.worker = Operations(self.clock)
        tell_operations(cast(RealWorker, self.worker), self.observer)

    def span(self, start_ms: int, end_ms: int) -> tuple[int, int]:
        return self.began + start_ms * MS, self.began + end_ms * MS

    @property
    def moments(self) -> list[tuple[float, float, str, str]]:
        return self._strip.moments(0)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_a_wait_is_cut_by_what_was_exchanged_inside_it(run: Run) -> None:
    """A side loop that exchanges while the worker waits takes its time out of the wait."""
    run.clock.now += 1000 * MS
    run.worker.average(1, 500)
    run.observer.waited(0, "reply", 2, run.span(0, 2000))
    assert run.moments == [
        (0.0, 1.0, "waiting", "reply from server 0"),
        (1.0, 1.5, "communicating", "average with worker 1"),
        (1.5, 2.0, "waiting", "reply from server 0"),
    ]


def test_a_call_inside_another_is_a_part_of_it(run: Run) -> None:
    """A broadcast sends to everybody, and is one exchange."""
    run.worker.broadcast(None, root=0)
    assert run.moments == [(0.0, 0.5, "communicating", "broadcast from worker 0")]


def test_what_other_threads_exchange_is_not_this_worker_s_time(run: Run) -> None:
    """A thread that receives may answer for the worker, which computes meanwhile."""
    thread = threading.Thread(target=run.worker.average, args=(1, 500))
    thread.start()
    thread.join()
    run.observer.computed(0, run.span(0, 500), 500 * MS, 8, None)
    assert run.moments == [(0.0, 0.5, "computing", "")]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("cew "), st.integers(1, 500)), min_size=1, max_size=400))
def test_the_moments_follow_each_other_without_gap_or_overlap(
    parts: list[tuple[str, int]],
) -> None:
    """Every moment up to the last one written down is said to be spent on exactly one thing."""
    with pytest.MonkeyPatch.context() as patch:
        run = Run(patch)
        for kind, ms in parts:
            began = run.clock.now
            if kind == "e":
                run.worker.average(1, ms)
                continue
            run.clock.now += ms * MS
            span = (began, run.clock.now)
            if kind == "c":
                run.observer.computed(0, span, ms * MS, 8, None)
            elif kind == "w":
                run.observer.waited(0, "reply", 1, span)
    found = run.moments
    assert all(end > start for start, end, _, _ in found)
    assert all(before[1] == after[0] for before, after in pairwise(found))
    assert not found or found[0][0] == 0.0
    waited = sum(ms for kind, ms in parts if kind == "w")
    assert run.observer.metrics.waiting_by_cause.get("reply", 0.0) == pytest.approx(waited / 1000)


def test_what_a_worker_has_counted_survives_its_log(run: Run) -> None:
    """The caller of `train` and a worker that goes on from a checkpoint read the same numbers."""
    run.observer.computed(0, run.span(0, 3), 3 * MS, 8, None)
    run.observer.waited(0, "reply", 2, run.span(3, 5))
    run.observer.exchanged(1, 0, 0)
    run.observer.stale(0, 4, 0)
    run.observer.observed(0, "dropped", 1.0, 0)
    for ms in (0, 4, 13):
        run.observer.began_step(0, run.began + ms * MS)
    state = run.observer.metrics.state()
    read = RunObserver(2, [0]).metrics
    read.load(0, state)
    assert read.state() == state
    assert state["waiting_seconds"] == {"reply from server 0": 0.002}
    assert (state["longest_step_gap_at"], state["longest_step_gap_seconds"]) == (0.004, 0.009)
