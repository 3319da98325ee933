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
    exchanges: float = 0.0
    """Models got from others; a part of one, as from one of several servers, counts as a part."""

    @property
    def waited_ns(self) -> int:
        return sum(self.waiting_ns.values())


@dataclass
class Tally:
    """A stream of whole numbers, as count, sum, maximum and histogram."""

    count: int = 0
    total: int = 0
    most: int | None = None
    histogram: dict[int, int] = field(default_factory=dict[int, int])

    def add(self, value: int) -> None:
        self.count += 1
        self.total += value
        self.most = value if self.most is None else max(self.most, value)
        self.histogram[value] = self.histogram.get(value, 0) + 1

    @property
    def mean(self) -> float | None:
        """None where there was nothing to measure."""
        return self.total / self.count if self.count else None


@dataclass
class Observed:
    """A stream of numbers that a method told."""

    count: int = 0
    total: float = 0.0
    most: float | None = None


@dataclass
class Accounts:
    """The books of a whole run."""

    workers: list[WorkerAccount]
    staleness: Tally = field(default_factory=Tally)
    """Updates that a gradient missed between its read and its application, of the replica that it
    is applied to."""
    global_staleness: Tally = field(default_factory=Tally)
    """Updates of all workers meanwhile, where others change a worker's parameters."""
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
        seen.most = value if seen.most is None else max(seen.most, value)

    @property
    def steps(self) -> int:
        return sum(account.steps for account in self.workers)

    @property
    def exchanges_per_step(self) -> float | None:
        """None where nobody gets anything from anybody."""
        exchanges = sum(account.exchanges for account in self.workers)
        return exchanges / max(1, self.steps) if exchanges else None

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
