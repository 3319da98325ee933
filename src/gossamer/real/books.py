"""What one real worker counts: steps, waiting and for what, exchanges, staleness."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Books:
    """Of one process. Written by its own threads, read at the end and for progress."""

    steps: int = 0
    samples: int = 0
    exchanges: int = 0
    bytes: int = 0
    """Moved by one-sided words and reductions; frames are counted where they are sent."""
    computing: float = 0.0
    waiting: dict[str, float] = field(default_factory=dict[str, float])
    staleness: dict[int, int] = field(default_factory=dict[int, int])
    observed: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Of what a method told: how many times, the sum, the largest."""

    def waited(self, label: str, seconds: float) -> None:
        self.waiting[label] = self.waiting.get(label, 0.0) + seconds

    def stale(self, updates: int) -> None:
        self.staleness[updates] = self.staleness.get(updates, 0) + 1

    def observe(self, what: str, value: float) -> None:
        seen = self.observed.setdefault(what, [0.0, 0.0, 0.0])
        seen[0] += 1
        seen[1] += value
        seen[2] = max(seen[2], value)

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "samples": self.samples,
            "exchanges": self.exchanges,
            "computing_seconds": self.computing,
            "waiting_seconds": self.waiting,
            "staleness": {str(key): count for key, count in sorted(self.staleness.items())},
            "observed": self.observed,
        }
