"""What the metrics count, per worker: computing, waiting and for what, staleness, exchanges."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class WorkerAccount:
    """One worker's books, in nanoseconds and counts."""

    steps: int = 0
    samples: int = 0
    computing_ns: int = 0
    waiting_ns: dict[str, int] = field(default_factory=dict[str, int])
    exchanges: int = 0

    @property
    def waited_ns(self) -> int:
        return sum(self.waiting_ns.values())


@dataclass
class Tally:
    """A stream of whole numbers, as count, sum, maximum and histogram."""

    count: int = 0
    total: int = 0
    most: int = 0
    histogram: dict[int, int] = field(default_factory=dict[int, int])

    def add(self, value: int) -> None:
        self.count += 1
        self.total += value
        self.most = max(self.most, value)
        self.histogram[value] = self.histogram.get(value, 0) + 1

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass
class Observed:
    """A stream of numbers that a method told."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0


@dataclass
class Accounts:
    """The books of a whole run."""

    workers: list[WorkerAccount]
    staleness: Tally = field(default_factory=Tally)
    """Updates that a gradient missed between its read and its application."""
    age: Tally = field(default_factory=Tally)
    """Steps that a peer had made since the model that it gave in an exchange."""
    observed: dict[str, Observed] = field(default_factory=dict[str, "Observed"])
    """What methods told: dropped gradients, gaps of clocks, lengths of queues."""
    losses: list[Tensor] = field(default_factory=list[Tensor])
    """Training losses since the last evaluation, left on their device."""

    def observe(self, what: str, value: float) -> None:
        seen = self.observed.setdefault(what, Observed())
        seen.count += 1
        seen.total += value
        seen.most = max(seen.most, value)

    @property
    def steps(self) -> int:
        return sum(account.steps for account in self.workers)

    @property
    def exchanges_per_step(self) -> float:
        return sum(account.exchanges for account in self.workers) / max(1, self.steps)

    @property
    def longest_wait(self) -> str | None:
        """What the workers together have waited for the longest."""
        causes: dict[str, int] = {}
        for account in self.workers:
            for cause, waited in account.waiting_ns.items():
                causes[cause] = causes.get(cause, 0) + waited
        return max(causes, key=lambda cause: causes[cause], default=None)

    def waiting_fraction(self, ended_ns: list[int]) -> float:
        """Time with nothing to compute and something awaited over total, mean over workers."""
        shares = [
            account.waited_ns / end if end else 0.0
            for account, end in zip(self.workers, ended_ns, strict=True)
        ]
        return sum(shares) / len(shares)
