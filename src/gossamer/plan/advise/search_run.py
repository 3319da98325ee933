"""A run that the search asks for, and the rule by which it ends; plain data for any process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gossamer.config.settings import Settings
from gossamer.errors import Error
from gossamer.runs.arrival import has_lasted
from gossamer.sim.simulation import Result, Row


@dataclass(frozen=True)
class StopRule:
    """When a run has told what it can; plain data, which another process can apply."""

    target: float
    key: str
    samples: int
    limit: float
    """The seconds after which it cannot change the answer."""
    extra: float
    """The seconds that it takes to have the model that was scored."""

    def told(self, history: Iterable[Row]) -> list[Row]:
        """The evaluations that count: those up to the first that ends the run."""
        stop, rows = self.stop(), list[Row]()
        for row in history:
            rows.append(row)
            if stop(row):
                break
        return rows

    def stop(self) -> Callable[[Row], bool]:
        """Make a function that takes one evaluation after the other, and says whether to stop."""
        rows: list[Row] = []
        is_over = False

        def stop(row: Row) -> bool:
            nonlocal is_over
            if not is_over:
                rows.append(row)
                score = row.get(self.key)
                is_over = (
                    has_lasted(rows, self.target, self.key)
                    or score is None
                    or not math.isfinite(float(score))
                    or row["samples"] >= self.samples
                    or row["virtual_seconds"] + self.extra > self.limit
                )
            return is_over

        return stop


@dataclass(frozen=True)
class SearchRun:
    """One run that the search asks for. It is kept in a folder if it has a name."""

    settings: Settings
    rule: StopRule
    what: str
    name: str | None = None


@dataclass(frozen=True)
class SearchFailure:
    """What the cluster did to a run, and what the run told before."""

    error: Error
    rows: list[Row]


Run = Callable[[Iterable[SearchRun]], Iterator[Result | SearchFailure]]
"""Makes runs and yields, in their order, what came of them. It takes a run from the iterable when
it can start it, and takes no more and yields no more where the time is over."""
