"""A whole probe between threads of one process: who is told what, and what ends it early."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from findings_made import INQUIRY

from gossamer.errors import Error, PeerLost, RunFailed
from gossamer.plan.probe import conductor as conducting
from gossamer.plan.probe.conductor import conduct, take_part
from gossamer.plan.probe.findings import ProbeFindings

CROWDED_S = 3.0
"""Long enough that on a busy machine, too, everybody's bytes come through in time."""


class Switchboard:
    """Joins the transports of one test."""

    def __init__(self, size: int) -> None:
        self.queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
        self.listeners: dict[int, Any] = {}
        self.everybody = threading.Barrier(size)
        self.dead: set[int] = set()

    def kill(self, rank: int) -> None:
        self.dead.add(rank)
        for other, listener in self.listeners.items():
            if other != rank:
                listener.lost(rank)


class ThreadTransport:
    """The part of a transport that a probe uses, between threads."""

    name = "threads"

    def __init__(self, board: Switchboard, rank: int) -> None:
        self.rank, self.size = rank, len(board.queues)
        self._board = board

    def open(self, windows: Any, initial: Any, listener: Any, stop: Any) -> None:
        self._board.listeners[self.rank] = listener
        self._thread = threading.Thread(target=self._receive, args=(listener,), daemon=True)
        self._thread.start()
        self._board.everybody.wait(100)

    def send(self, to: int, parts: Sequence[bytes]) -> None:
        # What a killed process would have said last, nobody hears.
        if self.rank not in self._board.dead:
            self._board.queues[to].put((self.rank, b"".join(parts)))

    def close(self) -> None:
        self._board.queues[self.rank].put(None)

    def _receive(self, listener: Any) -> None:
        while (frame := self._board.queues[self.rank].get()) is not None:
            listener.frame(frame[0], memoryview(frame[1]))


class Clockwork:
    """A model whose step does nothing, or what the test wants."""

    other_sizes: tuple[int, ...] = ()

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def step(self) -> tuple[float, float]:
        self._act()
        return 0.010, 0.001


class Probe:
    """All workers of one probe."""

    def __init__(self, patch: pytest.MonkeyPatch, hosts: str, seconds: float = 0.5) -> None:
        self.inquiry = dataclasses.replace(INQUIRY, seconds=seconds)
        self.board = Switchboard(len(hosts))
        self.acts: dict[int, Callable[[], None]] = {}
        self.errors: dict[int, Error] = {}
        self.heard: list[ProbeFindings | None] = []
        """What the other workers are told in the end."""
        self.told: list[tuple[float, str]] = []
        patch.setattr(conducting, "own_host", lambda: threading.current_thread().name)
        patch.setattr(
            conducting, "_stepper",
            lambda inquiry, transport: Clockwork(self.acts.get(transport.rank, lambda: None)),
        )  # fmt: skip
        self._hosts = hosts

    def run(self) -> ProbeFindings:
        (findings,) = self.end()
        return findings

    def end(self) -> list[ProbeFindings]:
        """Until everybody has gone; what worker 0 has found, if it lived to find it."""
        found: list[ProbeFindings] = []
        threads = [
            threading.Thread(target=self._work, args=(rank, found), name=host, daemon=True)
            for rank, host in enumerate(self._hosts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
            assert not thread.is_alive(), "somebody waits for ever"
        if 0 in self.errors:
            raise self.errors[0]
        return found

    def _work(self, rank: int, found: list[ProbeFindings]) -> None:
        transport: Any = ThreadTransport(self.board, rank)
        try:
            if rank == 0:
                found.append(conduct(transport, self.inquiry, lambda *told: self.told.append(told)))
            else:
                self.heard.append(take_part(transport, self.inquiry))
        except Error as error:
            self.errors[rank] = error
        except ZeroDivisionError:
            pass  # of a worker that the test breaks


@pytest.fixture
def probe_of() -> Iterator[Callable[..., Probe]]:
    with pytest.MonkeyPatch.context() as patch:
        yield partial(Probe, patch)


def test_everything_is_measured_and_progress_is_told(probe_of: Callable[..., Probe]) -> None:
    """Steps of all, pairs both ways, and three crowds, in this order."""
    probe = probe_of("aabb", CROWDED_S)
    found = probe.run()
    assert found.hosts == ["a", "a", "b", "b"]
    assert [steps.compute[0] for steps in found.steps] == [0.010] * 4
    # How many rounds the time allows is the machine's business; the first one always is.
    pairs = {(link.source, link.target) for link in found.links}
    assert pairs == {(b, a) for a, b in pairs} >= {(0, 1), (2, 3)}
    assert [crowd.pattern for crowd in found.crowds] == ["inside", "between", "to_one"]
    assert all(rate > 0 for crowd in found.crowds for rate in crowd.rates.values())
    shares = [share for share, _ in probe.told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert probe.errors == {}
    assert probe.heard == [found] * 3


def test_two_workers_make_no_crowd_towards_one(probe_of: Callable[..., Probe]) -> None:
    """One sender is a link."""
    found = probe_of("ab").run()
    assert [crowd.pattern for crowd in found.crowds] == ["between"]


def test_one_worker_measures_its_steps(probe_of: Callable[..., Probe]) -> None:
    """There is nobody to send anything to."""
    found = probe_of("a").run()
    assert (len(found.steps), found.links, found.crowds) == (1, [], [])


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_death_ends_the_probe_with_a_sentence(
    probe_of: Callable[..., Probe], victim: int
) -> None:
    """It names who was lost and when; whoever is left goes home."""
    probe = probe_of("abc")
    dead = threading.Event()

    def die() -> None:
        if not dead.is_set():
            dead.set()
            probe.board.kill(victim)
            raise ZeroDivisionError

    probe.acts[victim] = die
    if victim == 0:
        with pytest.MonkeyPatch.context() as patch:
            # The dead dismiss nobody.
            patch.setattr(conducting.Conductor, "dismiss", lambda self, found: None)
            assert probe.end() == []
        assert set(probe.errors) == {1, 2}
        assert all(isinstance(error, PeerLost) for error in probe.errors.values())
        return
    with pytest.raises(RunFailed) as raised:
        probe.run()
    assert f"worker {victim} is lost: it died while steps were measured" in str(raised.value)
    assert "nothing was written" in str(raised.value)


def test_a_worker_that_fails_says_why(probe_of: Callable[..., Probe]) -> None:
    """Worker 0 repeats it, and nobody waits for the rest."""
    probe = probe_of("abc")

    def fail() -> None:
        raise ZeroDivisionError("no such batch")

    probe.acts[2] = fail
    with pytest.raises(RunFailed, match="worker 2 gave up: ZeroDivisionError: no such batch"):
        probe.run()
