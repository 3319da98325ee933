"""Steps, links and crowds against a clock and a network that the test moves itself."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.plan.probe import links
from gossamer.plan.probe import step_times as measure
from gossamer.plan.probe.links import (
    all_to_one,
    flood,
    measure_link,
    pairs_of,
    ring_between,
    rounds,
)

LAW = settings(max_examples=40)
HOSTS = st.lists(st.sampled_from("abcd"), min_size=2, max_size=10)


class Clock:
    """Time that passes only when something takes it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Wire:
    """Stands in for the post: one link of known latency and bandwidth."""

    def __init__(self, clock: Clock, latency: float, bandwidth: float) -> None:
        self.rank = 0
        self.largest = 0
        self._clock, self._latency, self._bandwidth = clock, latency, bandwidth
        self._arrivals: list[float] = []
        self._free_at = 0.0

    def ping(self, peer: int) -> float:
        self._clock.now += 2 * self._latency
        return 2 * self._latency

    def transfer(self, peer: int, bulk: bytes) -> float:
        self.largest = max(self.largest, len(bulk))
        took = 2 * self._latency + len(bulk) / self._bandwidth
        self._clock.now += took
        return took

    def start_transfer(self, peer: int, bulk: bytes) -> None:
        self._free_at = max(self._free_at, self._clock.now) + len(bulk) / self._bandwidth
        self._arrivals.append(self._free_at + 2 * self._latency)

    def wait_for_echo(self, peer: int) -> None:
        self._clock.now = max(self._clock.now, self._arrivals.pop(0))


@LAW
@given(st.floats(1e-6, 0.02), st.floats(1e6, 1e10), st.floats(0.05, 2.0))
def test_a_link_is_measured_as_it_is(latency: float, bandwidth: float, seconds: float) -> None:
    """Latency is no part of the bandwidth, and the time given is kept to a few messages."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "time", clock)
        wire = Wire(clock, latency, bandwidth)
        found = measure_link(wire, 3, seconds)  # pyright: ignore[reportArgumentType]
    assert (found.source, found.target) == (0, 3)
    assert found.latency == pytest.approx(latency)
    # What a link carries within its latency cannot be told from latency.
    if 0.1 * (2 * latency + wire.largest / bandwidth) < wire.largest / bandwidth:
        assert found.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    longest = 2 * latency + wire.largest / bandwidth
    assert clock.now - 100.0 <= seconds + 2 * longest + 8 * latency


@LAW
@given(st.floats(1e-6, 1e-3), st.floats(1e7, 1e10))
def test_a_flood_counts_what_passed(latency: float, bandwidth: float) -> None:
    """Two messages under way hide a latency that is short against them."""
    clock = Clock()
    size = max(1 << 16, int(0.02 * bandwidth))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "time", clock)
        wire = Wire(clock, latency, bandwidth)
        rate = flood(wire, 1, 1.0, min(size, 1 << 24))  # pyright: ignore[reportArgumentType]
    assert rate == pytest.approx(bandwidth, rel=0.2)
    assert clock.now - 100.0 <= 1.2


@LAW
@given(st.floats(0.001, 3.0), st.floats(0.5, 30.0))
def test_steps_end_with_their_time(step: float, seconds: float) -> None:
    """The first fifth warms up; at least one step counts, and no further begins too late."""
    clock = Clock()

    def take() -> tuple[float, float]:
        clock.now += step
        return step, 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "time", clock)
        found = measure.measure_steps(take, seconds, lambda passed: None)
    assert found.count >= 1
    assert clock.now - 100.0 <= max(seconds, 3 * step) + 1.001 * step
    assert found.count * step <= 0.8 * seconds + 1.001 * step
    assert 1 <= len(found.compute) <= 4000


@LAW
@given(HOSTS)
def test_every_pair_has_its_round_and_no_host_is_in_two(hosts: list[str]) -> None:
    """Pairs that are measured at once have no machine in common."""
    planned = rounds(hosts)
    assert sorted(pair for one in planned for pair in one) == list(
        combinations(range(len(hosts)), 2)
    )
    for one in planned:
        used = [host for a, b in one for host in {hosts[a], hosts[b]}]
        assert len(used) == len(set(used))


def test_hosts_apart_are_measured_at_once() -> None:
    """Four hosts need three rounds of two pairs, not six."""
    assert len(rounds(["a", "b", "c", "d"])) == 3


@pytest.mark.parametrize("size", [65, 100, 256])
def test_of_very_many_workers_each_has_some_partners(size: int) -> None:
    """The number of pairs grows no faster than n log n, and neighbours come first."""
    pairs = pairs_of(size)
    assert len(pairs) == len(set(pairs)) <= size * size.bit_length()
    assert {rank for pair in pairs[:size] for rank in pair} == set(range(size))


@LAW
@given(HOSTS)
def test_crowds_go_where_they_should(hosts: list[str]) -> None:
    """Rings stay inside or leave; everybody of the other hosts aims at one."""
    assert all(hosts[a] == hosts[b] and a != b for a, b in links.ring_inside(hosts).items())
    ring = ring_between(hosts)
    assert all(hosts[a] != hosts[b] for a, b in ring.items())
    assert len(ring) == (len(hosts) if len(set(hosts)) > 1 else 0)
    senders = all_to_one(hosts, 0)
    assert set(senders.values()) == {0}
    assert 0 not in senders
