"""How stale gradients are at an asynchronous server: a Monte-Carlo beside a simulated run.

The Monte-Carlo is the argument of the study of delayed gradients in thirty lines: N workers read,
compute for a random time and write, and a gradient's staleness counts the writes in between. The
simulated run is Downpour on the same compute times, with everything that a method and a network
are. Both must give the same histogram, with a mean of N - 1 whatever the distribution.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.settings import make_settings
from gossamer.sim.simulation import Simulation
from gossamer.specs import check_range
from gossamer.tasks import make_task


@dataclass(frozen=True)
class Histogram:
    """How often each staleness occurred."""

    counts: Mapping[int, int]

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        return sum(value * count for value, count in self.counts.items()) / self.total

    @property
    def deviation(self) -> float:
        mean = self.mean
        squares = sum(count * (value - mean) ** 2 for value, count in self.counts.items())
        return (squares / self.total) ** 0.5

    def share(self, value: int) -> float:
        return self.counts.get(value, 0) / self.total

    def distance(self, other: Histogram) -> float:
        """The total variation: the share of gradients that differ; 0 for equal histograms."""
        values = {*self.counts, *other.counts}
        return sum(abs(self.share(value) - other.share(value)) for value in values) / 2

    def as_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "deviation": self.deviation, "histogram": self.ordered()}

    def ordered(self) -> dict[int, int]:
        return dict(sorted(self.counts.items()))


def monte_carlo(compute: Compute, workers: int, updates: int, seed: int) -> Histogram:
    """Let workers read, compute and write, without messages and parameters: only times count."""
    check_range("workers", workers, 1)
    check_range("updates", updates, 1)
    rng = random.Random(seed)
    read = [0] * workers
    # As in the simulator, the order of workers that finish at the same moment is random.
    finishing = [(compute.draw(rng), rng.random(), worker) for worker in range(workers)]
    heapq.heapify(finishing)
    counts: Counter[int] = Counter()
    for version in range(updates):
        now, _, worker = finishing[0]
        counts[version - read[worker]] += 1
        read[worker] = version + 1
        heapq.heapreplace(finishing, (now + compute.draw(rng), rng.random(), worker))
    return Histogram(counts)


def simulated(compute: Compute, workers: int, updates: int, seed: int) -> Histogram:
    """Simulate Downpour without gradients, on a network that takes almost no time."""
    check_range("updates", updates, 1)
    task = make_task("quadratic:dimension=1,samples=1024")
    free = Wires(bandwidth=1e15, latency=0.0)
    settings = make_settings(
        task,
        "downpour",
        Cluster(name="staleness", workers=workers, compute=compute, network=free),
        seed=seed,
        batch=1,
        epochs=updates / len(task.train),
        engine="none",
    )
    return Histogram(Simulation(settings).run().staleness)
