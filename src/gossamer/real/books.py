"""What one real worker counts: steps, waiting and for what, exchanges, staleness."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gossamer.pending import Pending


@dataclass
class Books:
    """Of one process. Written by its own threads, read at the end and for progress."""

    steps: int = 0
    samples: int = 0
    exchanges: float = 0.0
    """Models got from others; what one of several servers holds counts as a part."""
    bytes: int = 0
    """Moved by one-sided words and reductions; frames are counted where they are sent."""
    computing: float = 0.0
    waiting: dict[str, float] = field(default_factory=dict[str, float])
    staleness: dict[int, int] = field(default_factory=dict[int, int])
    observed: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Of what a method told: how many times, the sum, the largest."""
    longest_gap: float = 0.0
    """The longest time from the beginning of a step to that of the next, whatever was between."""
    longest_gap_at: float = 0.0
    """When it began, in seconds since the first step."""
    _first_step: float | None = None
    _last_step: float = 0.0

    def stepped(self, now: float) -> None:
        """A step begins, or the last one is over."""
        if self._first_step is None:
            self._first_step = now
        elif now - self._last_step > self.longest_gap:
            self.longest_gap = now - self._last_step
            self.longest_gap_at = self._last_step - self._first_step
        self._last_step = now

    def waited(self, what: Pending[Any], began: float, ended: float) -> None:
        if what.label == "gradient":
            return  # computed by the very thread that awaits it
        self.waiting[what.label] = self.waiting.get(what.label, 0.0) + ended - began

    def stale(self, updates: int) -> None:
        self.staleness[updates] = self.staleness.get(updates, 0) + 1

    def observe(self, what: str, value: float) -> None:
        seen = self.observed.setdefault(what, [0.0, 0.0, 0.0])
        seen[0] += 1
        seen[1] += value
        seen[2] = max(seen[2], value)

    @property
    def longest_wait(self) -> str | None:
        """What the worker has waited for the longest so far."""
        waiting = dict(self.waiting)
        return max(waiting, key=lambda cause: waiting[cause], default=None)

    @property
    def mean_staleness(self) -> float | None:
        """None where there was nothing to measure."""
        tally = dict(self.staleness)
        updates = sum(staleness * count for staleness, count in tally.items())
        return updates / sum(tally.values()) if tally else None

    def summary(self) -> dict[str, Any]:
        """For the callbacks of a user's loop, by the names of a whole run's summary."""
        return {
            "steps": self.steps,
            "exchanges_per_step": self.exchanges / max(1, self.steps) if self.exchanges else None,
            "waiting_by_cause": dict(self.waiting),
            "mean_staleness": self.mean_staleness,
            "max_staleness": max(self.staleness, default=None),
            "dropped_gradients": int(self.observed.get("dropped", [0.0])[0]),
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "samples": self.samples,
            "exchanges": self.exchanges,
            "computing_seconds": self.computing,
            "waiting_seconds": self.waiting,
            "staleness": {str(key): count for key, count in sorted(self.staleness.items())},
            "observed": self.observed,
            "longest_step_gap_seconds": self.longest_gap,
            "longest_step_gap_at": self.longest_gap_at,
        }
