"""Successive halving over learning curves in time: short runs of all, longer runs of the best.

The length of a rung is counted in samples, because samples cost work; but the question is about
time. A method that is fast per second may be slow per sample, so two candidates are not compared
at equal samples but at the last moment up to which both were measured. A candidate whose curve is
the higher one at every moment wins all its comparisons and is never dropped. Curves may cross: the
fastest at first need not be the fastest to a tight goal, so the best of every kind stays in.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

C = TypeVar("C", bound=Hashable)


@dataclass(frozen=True)
class LearningCurve:
    """The best score so far against time, higher is better; between points a straight line."""

    times: tuple[float, ...]
    scores: tuple[float, ...]

    @property
    def end(self) -> float:
        """Up to when the curve is known; infinity if the run has nothing more to show."""
        return self.times[-1] if self.times else math.inf

    @property
    def best(self) -> float:
        return self.scores[-1] if self.scores else -math.inf

    def at(self, time: float) -> float:
        """The best score up to this moment."""
        place = bisect.bisect_right(self.times, time)
        if place == 0:
            return -math.inf
        if place == len(self.times) or self.scores[place] == self.scores[place - 1]:
            return self.scores[place - 1]
        before, after = self.times[place - 1], self.times[place]
        share = (time - before) / (after - before)
        return self.scores[place - 1] + share * (self.scores[place] - self.scores[place - 1])

    def arrival(self, goal: float) -> float:
        """When the goal is reached; infinity if it is not."""
        for place, score in enumerate(self.scores):
            if score >= goal:
                if place == 0 or score == goal:
                    return self.times[place]
                before, low = self.times[place - 1], self.scores[place - 1]
                return before + (self.times[place] - before) * (goal - low) / (score - low)
        return math.inf


def curve(points: Sequence[tuple[float, float]], *, is_over: bool = False) -> LearningCurve:
    """The curve through (time, score), in order of time; a score that is no number is no progress.

    `is_over`: no better score will follow, because the run failed, diverged or was complete.
    """
    times: list[float] = []
    scores: list[float] = []
    best = -math.inf
    for time, score in points:
        best = max(best, score) if math.isfinite(score) else best
        if times and times[-1] == time:
            scores[-1] = best
        else:
            times.append(time)
            scores.append(best)
    if is_over:
        times.append(math.inf)
        scores.append(best)
    return LearningCurve(tuple(times), tuple(scores))


def order(curves: Mapping[C, LearningCurve], goal: float) -> list[C]:
    """The best first: by comparisons won against all others, then by arrival at the goal."""
    known = {one: _up_to(goal, own) for one, own in curves.items()}

    def standing(one: C) -> tuple[float, float, float]:
        own, won = known[one], 0.0
        for other, theirs in known.items():
            if other == one:
                continue
            moment = min(own.end, theirs.end)
            mine, yours = own.at(moment), theirs.at(moment)
            won += 1.0 if mine > yours else 0.5 if mine == yours else 0.0
        return -won, curves[one].arrival(goal), -own.best

    # The sort is stable: among equals the one that was named first stays first.
    return sorted(known, key=standing)


def _up_to(goal: float, own: LearningCurve) -> LearningCurve:
    """The curve up to its arrival: how far a run overshoots the goal does not count."""
    arrival = own.arrival(goal)
    if math.isinf(arrival):
        return own
    kept = bisect.bisect_left(own.times, arrival)
    return LearningCurve((*own.times[:kept], arrival), (*own.scores[:kept], goal))


@dataclass(frozen=True)
class Rung:
    """A stage: the candidates that are left run for a share of the samples, and the best go on."""

    share: float
    keep: int
    """How many go on, besides the best of every kind."""


@dataclass
class HalvingStage(Generic[C]):
    """What one rung found."""

    rung: Rung
    entrants: list[C]
    curves: dict[C, LearningCurve] = field(default_factory=dict[Any, LearningCurve])
    kept: list[C] = field(default_factory=list[Any])


Measure = Callable[[HalvingStage[C]], Iterable[LearningCurve]]
"""Runs the entrants of a stage and yields their curves in order. A run may end when its time passes
`Halving.limit`, which follows from the curves that were yielded before."""


class Halving(Generic[C]):
    """The stages so far, also after an interruption."""

    def __init__(
        self,
        candidates: Sequence[C],
        goal: float,
        kind: Callable[[C], Hashable] = lambda candidate: None,
    ) -> None:
        self.goal = goal
        self._left = list(candidates)
        self._kind = kind
        self.stages: list[HalvingStage[C]] = []

    def run(self, rungs: Sequence[Rung], measure: Measure[C]) -> list[C]:
        """The survivors of the last rung, the best first."""
        for rung in rungs:
            stage = HalvingStage(rung, self._left)
            self.stages.append(stage)
            for candidate, own in zip(stage.entrants, measure(stage), strict=True):
                stage.curves[candidate] = own
            stage.kept = self._keep(order(stage.curves, self.goal), rung.keep)
            self._left = stage.kept
        return self._left

    def _keep(self, ranking: list[C], count: int) -> list[C]:
        best = {self._kind(candidate): candidate for candidate in reversed(ranking)}
        kept = {*ranking[:count], *best.values()}
        return [candidate for candidate in ranking if candidate in kept]

    def limit(self, stage: HalvingStage[C]) -> float:
        """Once as many have arrived as will be kept, a later one cannot be among them."""
        arrivals = sorted(own.arrival(self.goal) for own in stage.curves.values())
        return arrivals[stage.rung.keep - 1] if len(arrivals) >= stage.rung.keep else math.inf

    def standing(self) -> list[C]:
        """All candidates, the best first: those that are still in, then those left behind."""
        ranking: list[C] = []
        for at in range(len(self.stages) - 1, -1, -1):
            stage = self.stages[at]
            earlier = self.stages[at - 1].curves if at else {}
            merged = {c: stage.curves.get(c) or earlier.get(c) for c in stage.entrants}
            known = {c: own for c, own in merged.items() if own is not None and c not in ranking}
            ranking += order(known, self.goal)
        return ranking
