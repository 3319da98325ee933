"""A worker slowed down by a factor takes that many times its undisturbed time for a step."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.real.faults import slow_worker as slowness
from gossamer.real.faults.slow_worker import Slowness


class Machine:
    """A clock that only sleeping and computing move; a step after a sleep takes longer."""

    def __init__(self, step_s: float, cold_s: float = 0.0) -> None:
        self.now = 0.0
        self.step_s = step_s
        self.cold_s = cold_s
        self._is_cold = False

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 6e-5  # nobody wakes up in time
        self._is_cold = True

    def step(self, of: Slowness, extra_s: float = 0.0) -> float:
        began = self.now
        self.now += self.step_s + extra_s + (self.cold_s if self._is_cold else 0.0)
        self._is_cold = False
        of.lengthen(self.now - began)
        return self.now - began


def made(machine: Machine, factor: float, patch: pytest.MonkeyPatch) -> Slowness:
    patch.setattr(slowness, "time", machine)
    return Slowness(factor)


@settings(max_examples=20, deadline=None)
@given(
    factor=st.floats(1.2, 20.0),
    step_s=st.sampled_from([1e-4, 5e-4, 5e-3, 0.05, 2.0]),
    coldness=st.floats(0.0, 1.0),
)
def test_the_mean_step_is_the_factor_times_an_undisturbed_one(
    factor: float, step_s: float, coldness: float
) -> None:
    """However much longer the step after a sleep takes, up to twice as long."""
    machine = Machine(step_s, min(coldness * step_s, 5e-4))
    with pytest.MonkeyPatch.context() as patch:
        slow = made(machine, factor, patch)
        for _ in range(300):
            machine.step(slow)
        began = machine.now
        for _ in range(640):
            machine.step(slow)
    assert (machine.now - began) / 640 == pytest.approx(factor * step_s, rel=0.05)


def test_nearly_every_step_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow worker is no quick one that rests now and then."""
    machine = Machine(5e-4, 5e-4)
    slow = made(machine, 4.0, monkeypatch)
    for _ in range(300):
        machine.step(slow)
    steps = [machine.step(slow) for _ in range(640)]
    near = [took for took in steps if took == pytest.approx(2e-3, rel=0.1)]
    assert len(near) >= 0.95 * len(steps)


def test_it_follows_steps_that_become_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are short, and all but a few of them follow a sleep."""
    machine = Machine(5e-4, 5e-4)
    slow = made(machine, 4.0, monkeypatch)
    for _ in range(300):
        machine.step(slow)
    machine.step_s = 2e-3
    for _ in range(700):
        machine.step(slow)
    began = machine.now
    for _ in range(320):
        machine.step(slow)
    assert (machine.now - began) / 320 == pytest.approx(8e-3, rel=0.05)


def test_a_long_first_step_and_later_ones_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading code, or a moment without a core, is not what a step takes."""
    machine, rng = Machine(5e-4, 5e-4), random.Random(1)
    slow = made(machine, 4.0, monkeypatch)
    machine.step(slow, extra_s=1.0)
    for _ in range(300):
        machine.step(slow, extra_s=0.01 if rng.random() < 0.1 else 0.0)
    began = machine.now
    for _ in range(320):
        machine.step(slow)
    assert (machine.now - began) / 320 == pytest.approx(2e-3, rel=0.1)


def test_after_standing_still_nobody_hurries_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause in the middle of a step is caught up with by a few steps' time, not by all of it."""
    machine = Machine(5e-3)
    slow = made(machine, 4.0, monkeypatch)
    for _ in range(100):
        machine.step(slow)
    machine.step(slow, extra_s=100.0)
    assert sum(machine.step(slow) for _ in range(20)) > 15 * 20e-3


def test_a_worker_that_is_not_slow_never_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(5e-4)
    quick = made(machine, 1.0, monkeypatch)
    assert [machine.step(quick) for _ in range(50)] == pytest.approx([5e-4] * 50)


def test_a_long_sleep_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked while it sleeps may raise, and is asked at least every tenth of a second."""
    machine, asked = Machine(10.0), list[float]()
    monkeypatch.setattr(slowness, "time", machine)
    slow = Slowness(4.0, lambda: asked.append(machine.now))
    for _ in range(4):
        machine.step(slow)
    gaps = [after - before for before, after in pairwise(asked)]
    assert sum(1 for gap in gaps if gap > 0.1) <= 1  # the one step in between
    assert len(gaps) > 900
