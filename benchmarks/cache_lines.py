"""What it costs to write where another process has just read.

    OMP_NUM_THREADS=1 python benchmarks/cache_lines.py
    OMP_NUM_THREADS=1 python benchmarks/cache_lines.py --rounds 40 --json

Two processes, each on a processor of its own. One changes a vector of 0.8 MB, a small perceptron's
parameters, the other reads it, in turns; in between the first computes a little. A line of memory
that both have looked at must be taken from the other's cache before it can be written. Processors
that share a cache do that quickly, others do not, and a virtual machine may be moved from the one
kind of pair to the other at any moment: so every round measures all ways anew.

    alone        nobody reads
    in place     the reader has read it since the last change
    in turns     the change is written to the next of 16 vectors, so that none is written soon after
                 it was read
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from mmap import mmap

import torch
from torch import Tensor

COUNT = 784 * 256 + 256 + 256 * 10 + 10
TURNS = 16
PAGE = 4096
REPEATS = 40
IS_OVER = 1 << 40


class Shared:
    """Memory of both: the number of the change, which vector it is in, what has been read."""

    def __init__(self) -> None:
        self._stride = -(-COUNT * 4 // PAGE) * PAGE
        self._memory = mmap(-1, PAGE + (TURNS + 1) * self._stride)
        self._words = memoryview(self._memory).cast("Q")
        self.vectors = [self._vector(number) for number in range(TURNS + 1)]

    def _vector(self, number: int) -> Tensor:
        offset = PAGE + number * self._stride
        return torch.frombuffer(self._memory, dtype=torch.float32, offset=offset, count=COUNT)

    def show(self, change: int, vector: int) -> None:
        self._words[8] = vector
        self._words[0] = change

    def wait_for_reader(self, change: int) -> None:
        while self._words[16] != change:
            os.sched_yield()

    def read_for_ever(self) -> None:
        own, last = torch.zeros(COUNT), 0
        while (change := self._words[0]) != IS_OVER:
            if change == last:
                os.sched_yield()
                continue
            own.lerp_(self.vectors[self._words[8]], 0.5)
            self._words[16] = last = change


class Writer:
    """Its own parameters, and the ways to make the change."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._own, self._gradient = torch.zeros(COUNT), torch.full((COUNT,), 1e-3)
        self._inputs, self._weights = torch.randn(32, 784), torch.randn(784, 256)
        self._changes = self._turn = 0

    def alone(self) -> int | None:
        self._own.add_(self._gradient, alpha=-0.01)
        return None

    def in_place(self) -> int | None:
        self._shared.vectors[0].add_(self._gradient, alpha=-0.01)
        return 0

    def in_turns(self) -> int | None:
        before, self._turn = self._turn, self._turn % TURNS + 1
        vectors = self._shared.vectors
        torch.add(vectors[before], self._gradient, alpha=-0.01, out=vectors[self._turn])
        return self._turn

    def microseconds(self, way: Callable[[], int | None]) -> float:
        """Of one change, the median of some."""
        times: list[float] = []
        for _ in range(REPEATS):
            (self._inputs @ self._weights).relu_()
            began = time.perf_counter()
            vector = way()
            times.append(time.perf_counter() - began)
            if vector is not None:
                self._changes += 1
                self._shared.show(self._changes, vector)
                self._shared.wait_for_reader(self._changes)
        return 1e6 * statistics.median(times)


def measure(rounds: int, pause_s: float = 0.5) -> dict[str, list[float]]:
    """Of each way, the microseconds in each round."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    shared = Shared()
    reader = os.fork()
    if reader == 0:
        os.sched_setaffinity(0, {second})
        shared.read_for_ever()
        os._exit(0)
    try:
        os.sched_setaffinity(0, {first})
        writer = Writer(shared)
        ways = {"alone": writer.alone, "in place": writer.in_place, "in turns": writer.in_turns}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                found[name].append(writer.microseconds(way))
            time.sleep(pause_s)
        return found
    finally:
        shared.show(IS_OVER, 0)
        os.waitpid(reader, 0)


_NEAR = 6.0
"""Times as long as a change alone takes: 3 where the processors share a cache, 15 where not."""


def cores_share_a_cache() -> bool | None:
    """At this moment; None where there is only one processor."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        return None
    try:
        found = measure(1, pause_s=0.0)
    finally:
        os.sched_setaffinity(0, allowed)
    return found["in place"][0] < _NEAR * found["alone"][0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=60, help="half a second each (60)")
    parser.add_argument("--json", action="store_true", help="every round's figures, as one line")
    chosen = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        print("cache_lines: needs two processors, got one", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    found = measure(max(1, chosen.rounds))
    if chosen.json:
        print(json.dumps(found))
        return 0
    print("us a change   least  quarter   median  three quarters   most")
    for name, times in found.items():
        low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        print(f"{name:12s} {min(times):6.0f}  {low:7.0f}  {middle:7.0f}", end="")
        print(f"  {high:14.0f}  {max(times):5.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
