"""Findings of clusters that exist in a test only, with numbers that are known."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gossamer.plan.probe.findings import Crowd, Inquiry, MeasuredLink, ProbeFindings, Steps
from gossamer.plan.probe.links import all_to_one, ring_between, ring_inside

INQUIRY = Inquiry("digits-mlp", None, 16, 0.1, "sgd:momentum=0.9", 1, 20.0)


def found(
    hosts: Sequence[str], *, step: float = 0.010, jitter: float = 0.1, other: float = 0.001,
    factors: Sequence[float] = (), cards: Sequence[float] = (), latency: float = 50e-6,
    memory: float = 4e9, crowded: float = 1.0, samples: int = 200,
) -> ProbeFindings:  # fmt: skip
    """Workers on hosts whose cards have these bandwidths, by order of the hosts."""
    rng = random.Random(7)
    names = list(dict.fromkeys(hosts))
    speeds = dict(zip(names, cards or [1e9] * len(names), strict=True))
    slow = list(factors) or [1.0] * len(hosts)

    def rate(one: int, other_one: int) -> float:
        mine, theirs = hosts[one], hosts[other_one]
        return memory if mine == theirs else min(speeds[mine], speeds[theirs])

    steps = [
        Steps(
            samples,
            [max(0.1, rng.gauss(1.0, jitter)) * step * factor for _ in range(samples)],
            [other] * samples,
        )
        for factor in slow
    ]
    ranks = range(len(hosts))
    links = [
        MeasuredLink(a, b, latency, rate(a, b), 100, 10) for a in ranks for b in ranks if a != b
    ]
    patterns = {
        "inside": ring_inside(hosts),
        "between": ring_between(hosts),
        "to_one": all_to_one(hosts, 0),
    }
    crowds = [
        Crowd(
            pattern, len(sends), 0 if pattern == "to_one" else None,
            {a: crowded * rate(a, b) for a, b in sends.items()},
        )
        for pattern, sends in patterns.items() if sends
    ]  # fmt: skip
    pairs = len(hosts) * (len(hosts) - 1) // 2
    return ProbeFindings(INQUIRY, "torch", list(hosts), steps, links, crowds, pairs, 1.7e9, 19.5)
