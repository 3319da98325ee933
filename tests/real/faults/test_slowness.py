"""A worker slowed down by a factor takes that many times its own time for a step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.real.faults import slow_worker
from gossamer.real.faults.slow_worker import Slowness


class Machine:
    """A clock that only sleeping and computing move."""

    def __init__(self, step_s: float) -> None:
        self.now = 0.0
        self.step_s = step_s

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 6e-5  # nobody wakes up in time

    def step(self, of: Slowness, extra_s: float = 0.0) -> float:
        began = self.now
        self.now += self.step_s + extra_s
        of.lengthen(self.now - began)
        return self.now - began


def made(machine: Machine, factor: float, patch: pytest.MonkeyPatch) -> Slowness:
    patch.setattr(slow_worker, "time", machine)
    return Slowness(factor)


@settings(max_examples=20)
@given(factor=st.floats(1.2, 20.0), step_s=st.sampled_from([1e-4, 5e-4, 5e-3, 0.05, 2.0]))
def test_the_mean_step_is_the_factor_times_its_own_time(factor: float, step_s: float) -> None:
    """Also where a sleep lasts longer than was asked for: the next one is shorter by that."""
    machine = Machine(step_s)
    with pytest.MonkeyPatch.context() as patch:
        slow = made(machine, factor, patch)
        for _ in range(10):
            machine.step(slow)
        began = machine.now
        for _ in range(200):
            machine.step(slow)
    assert (machine.now - began) / 200 == pytest.approx(factor * step_s, rel=0.05)


def test_it_follows_steps_that_become_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(5e-4)
    slow = made(machine, 4.0, monkeypatch)
    for _ in range(30):
        machine.step(slow)
    machine.step_s = 2e-3
    assert sum(machine.step(slow) for _ in range(100)) / 100 == pytest.approx(8e-3, rel=0.05)


def test_a_long_first_step_is_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is loaded in it: that is not what a step takes."""
    machine = Machine(5e-3)
    slow = made(machine, 4.0, monkeypatch)
    assert machine.step(slow, extra_s=1.0) == pytest.approx(1.005)
    assert sum(machine.step(slow) for _ in range(100)) / 100 == pytest.approx(2e-2, rel=0.05)


def test_a_pause_is_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stood still in the middle of a step is slow for that step, and as before afterwards."""
    machine = Machine(5e-3)
    slow = made(machine, 4.0, monkeypatch)
    for _ in range(100):
        machine.step(slow)
    assert machine.step(slow, extra_s=100.0) < 101.0
    assert sum(machine.step(slow) for _ in range(20)) == pytest.approx(20 * 20e-3, rel=0.05)


def test_a_worker_that_is_not_slow_never_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(5e-4)
    quick = made(machine, 1.0, monkeypatch)
    assert [machine.step(quick) for _ in range(50)] == pytest.approx([5e-4] * 50)


def test_a_long_sleep_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked while it sleeps may raise, and is asked at least every tenth of a second."""
    machine, asked = Machine(10.0), list[float]()
    monkeypatch.setattr(slow_worker, "time", machine)
    slow = Slowness(4.0, lambda: asked.append(machine.now))
    for _ in range(5):
        machine.step(slow)
    gaps = [after - before for before, after in pairwise(asked)]
    assert sum(1 for gap in gaps if gap > 0.1) <= 1  # the one step in between
    assert len(gaps) > 900
