"""Latency and bandwidth of pairs, the pairs measured at the same time, and crowds of senders."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import combinations

from gossamer.plan.probe.channel import ProbeChannel
from gossamer.plan.probe.findings import MeasuredLink

Pair = tuple[int, int]

SMALLEST = 1 << 16
LARGEST = 1 << 24
_LONG_ENOUGH_S = 0.02
"""A message that takes longer than this measures bandwidth, not latency."""
_WARM_TRIPS = 3
_MOST_TRIPS = 300
_MOST_MESSAGES = 50
_TRIPS_SHARE = 0.4
"""The share of a link's time that is spent on round trips."""
_WARM_UP = 0.2
_IN_FLIGHT = 2
MOST_PAIRS = 2016
"""The pairs of 64 workers; with more workers only some of the pairs are measured."""


def measure_link(post: ProbeChannel, peer: int, seconds: float) -> MeasuredLink:
    """Measure the link from this worker to another, in about this time."""
    began = time.monotonic()
    for _ in range(_WARM_TRIPS):
        post.ping(peer)
    trips: list[float] = []
    while not trips or (
        len(trips) < _MOST_TRIPS and time.monotonic() < began + _TRIPS_SHARE * seconds
    ):
        trips.append(post.ping(peer))
    # The bandwidth is computed with the shortest trip: delays of other trips are chance.
    trip = min(trips)
    until = began + seconds
    bulk = bytes(SMALLEST)
    took = post.transfer(peer, bulk)
    while took - trip < _LONG_ENOUGH_S and len(bulk) < LARGEST:
        if time.monotonic() + 4 * took > until:
            break  # the next size would leave no time to repeat it
        bulk = bytes(2 * len(bulk))
        took = post.transfer(peer, bulk)
    rates: list[float] = []
    while not rates or (len(rates) < _MOST_MESSAGES and time.monotonic() + took < until):
        took = post.transfer(peer, bulk)
        # The trip of the first byte there and of the answer back is latency.
        rates.append(len(bulk) / max(took - trip, 0.1 * took))
    latency = statistics.median(trips) / 2
    return MeasuredLink(
        post.rank, peer, latency, statistics.median(rates), len(trips), len(rates), trip / 2
    )


def flood(post: ProbeChannel, peer: int, seconds: float, size: int) -> float:
    """The bytes per second that this worker sends to another while others send too."""
    began = time.monotonic()
    counted_from, until = began + _WARM_UP * seconds, began + seconds
    bulk = bytes(size)
    under_way, passed, first = 0, 0, began
    while time.monotonic() < until or not passed:
        while under_way < _IN_FLIGHT:
            post.start_transfer(peer, bulk)
            under_way += 1
        post.wait_for_echo(peer)
        under_way -= 1
        now = time.monotonic()
        if now < counted_from:
            first = now
        else:
            passed += size
    last = time.monotonic()
    for _ in range(under_way):
        post.wait_for_echo(peer)
    return passed / max(last - first, 1e-9)


def pairs_of(size: int) -> list[Pair]:
    """The pairs to measure, neighbours first, so that an early end leaves no worker unmeasured.

    With very many workers these are the pairs at distances that are powers of two.
    """
    if size * (size - 1) // 2 <= MOST_PAIRS:
        return sorted(combinations(range(size), 2), key=lambda pair: _distance(pair, size))
    distances = [1 << power for power in range(size.bit_length()) if 1 << power <= size // 2]
    found = {
        (min(one, other), max(one, other)): None
        for distance in distances
        for one in range(size)
        if (other := (one + distance) % size) != one
    }
    return list(found)


def _distance(pair: Pair, size: int) -> int:
    apart = pair[1] - pair[0]
    return min(apart, size - apart)


def rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """Every pair once; the pairs of a round share no host, so they do not disturb each other."""
    left, planned = pairs_of(len(hosts)), list[list[Pair]]()
    while left:
        busy: set[str] = set()
        together: list[Pair] = []
        later: list[Pair] = []
        for one, other in left:
            used = {hosts[one], hosts[other]}
            if used & busy:
                later.append((one, other))
            else:
                busy |= used
                together.append((one, other))
        planned.append(together)
        left = later
    return planned


def ring_inside(hosts: Sequence[str]) -> dict[int, int]:
    """Each worker sends to the next worker of its own host, if there is one."""
    found: dict[int, int] = {}
    for members in _members(hosts):
        if len(members) > 1:
            found |= dict(zip(members, members[1:] + members[:1], strict=True))
    return found


def ring_between(hosts: Sequence[str]) -> dict[int, int]:
    """Each worker sends to a worker of the next host, if there is one."""
    groups = _members(hosts)
    if len(groups) < 2:
        return {}
    found: dict[int, int] = {}
    for members, nexts in zip(groups, groups[1:] + groups[:1], strict=True):
        found |= {rank: nexts[at % len(nexts)] for at, rank in enumerate(members)}
    return found


def all_to_one(hosts: Sequence[str], target: int) -> dict[int, int]:
    """All workers of the other hosts, or of the only host, send to one worker."""
    is_one = len(set(hosts)) == 1
    senders = [
        rank
        for rank, host in enumerate(hosts)
        if rank != target and (is_one or host != hosts[target])
    ]
    return dict.fromkeys(senders, target)


def _members(hosts: Sequence[str]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())
