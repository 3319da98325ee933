"""Ctrl-C in virtual time comes between two events, wherever the program was."""

from __future__ import annotations

import gc
import signal
import threading
import warnings
from collections.abc import Coroutine
from types import FrameType
from typing import Any

import pytest

from gossamer.replica import Replica
from gossamer.sim.simulation import Simulation
from gossamer.worker import Worker
from support import bowl, build, cluster_of, only_here


def press() -> None:
    """Python runs the handler of a signal that a thread sends itself before the next line."""
    signal.raise_signal(signal.SIGINT)


def with_loops(*, pressed: int, done: list[str]) -> Simulation:
    """Two loops, and Ctrl-C when both are made and neither has begun."""

    async def loop(w: Worker) -> None:
        for _ in range(3):
            await w.sleep(1.0)
            done.append("step")

    async def method(w: Worker, x: Replica) -> None:
        loops: list[Coroutine[Any, Any, None]] = [loop(w), loop(w)]
        for _ in range(pressed):
            press()
        done.append("begun")
        await w.together(*loops)

    return build(bowl(), only_here(method), cluster_of(2), steps=3, engine="none")


def complaints(simulation: Simulation) -> list[str]:
    """What Python says of coroutines that nobody awaited, of an interrupted run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            simulation.run()
        del simulation
        gc.collect()
    return [str(warning.message) for warning in caught]


def test_ctrl_c_waits_for_the_event_at_hand() -> None:
    """So no loop is lost between its making and its start; what comes later does not come."""
    done: list[str] = []
    assert complaints(with_loops(pressed=1, done=done)) == []
    assert done == ["begun"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait() -> None:
    """Python complains, as it must: here the two loops are lost."""
    done: list[str] = []
    assert any("never awaited" in said for said in complaints(with_loops(pressed=2, done=done)))
    assert done == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_after_the_last_event_counts() -> None:
    """The result that nobody waits for any more is not given back."""

    async def method(w: Worker, x: Replica) -> None:
        press()

    with pytest.raises(KeyboardInterrupt):
        build(bowl(), only_here(method), cluster_of(1), steps=1, engine="none").run()


def test_who_handles_the_signal_keeps_their_way() -> None:
    """A sweep, or a user's program."""
    seen: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with_loops(pressed=1, done=[]).run()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT] * 2


def test_a_run_in_a_thread_leaves_signals_alone() -> None:
    """Only the main thread may set a handler."""
    done: list[str] = []
    thread = threading.Thread(target=with_loops(pressed=0, done=done).run)
    thread.start()
    thread.join()
    assert done.count("step") == 12
