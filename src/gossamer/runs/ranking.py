"""Which method is first, as far as the seeds can tell: statistics of the times to a target.

All methods run with the same seeds, and a hard seed is hard for every method. The model of the
logarithm of a time is therefore an effect of the method, plus one of the seed, plus noise whose
variance is pooled: m methods with s seeds leave (m - 1)(s - 1) degrees of freedom. Holm's procedure
holds the tests of all pairs to one level together, so that comparisons with the best method are
valid although the same times decide which method is the best.

A target that was not reached comes later than the run's last evaluation. A method that misses the
target with every seed is not compared. A method that misses it with some seeds is ranked after all
that never miss it. In the tests its missing times are set to the end of the run, their lower bound,
so it is called slower only if it is slower even then. The noise of such times is pooled for these
tests alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from gossamer.runs.arrival import Arrival, Vector

LEVEL = 0.05
LOOKS = (3, 6, 12)
"""Numbers of seeds after which `--seeds auto` tests; each test has its share of the level."""
# Noise below the rounding of a time is not noise.
_LEAST_DEVIATION = 1e-6
_LEAST_SECONDS = 1e-9


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval.

    In a ranking the effect of the seeds is removed: the interval says how certain the ratio to
    another method on these seeds is, not how long a new seed would take.
    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class RankedMethod:
    """One method in the ranking."""

    arrival: Arrival
    span: Interval | None
    """The mean time and its 95 % interval; None unless every seed arrives."""
    times: float | None
    """How many times as long as the first method it takes; None unless every seed arrives."""
    is_close: bool
    """Whether the tests cannot tell it from the first method; true of the first itself."""

    @property
    def label(self) -> str:
        return self.arrival.label

    @property
    def bounds(self) -> tuple[float | None, float | None, float | None]:
        """The mean time, and the low and the high end of its interval."""
        span = self.span
        return (None, None, None) if span is None else (span.mean, span.low, span.high)


class Ranking:
    """The fastest method first, then those that arrive with some seeds only, more seeds first."""

    def __init__(self, arrivals: Sequence[Arrival], level: float = LEVEL) -> None:
        self.arrivals, self.seeds = _in_common(arrivals)
        self.level = level
        order = sorted(self.arrivals, key=_order)
        self._full = [one for one in order if one.mean is not None]
        self._some = [one for one in order if one.mean is None and one.reached]
        self._logs = {one.label: _logarithms(one) for one in (*self._full, *self._some)}
        self._known = self._pooled(self._full)
        self._whole = self._pooled([*self._full, *self._some])
        close = self._close()
        self.places = [self._place(one, close) for one in order]

    @property
    def can_tell(self) -> bool:
        """Whether there are enough seeds to name a winner: one seed says nothing about noise."""
        return self.seeds > 1

    @property
    def winner(self) -> RankedMethod | None:
        """The first method, if the tests tell it from every other method."""
        return self.places[0] if self.can_tell and len(self.close) == 1 else None

    @property
    def close(self) -> list[RankedMethod]:
        """The methods that may be first."""
        return [one for one in self.places if one.is_close]

    def _place(self, one: Arrival, close: set[str]) -> RankedMethod:
        best = self._full[0].mean if self._full else None
        times = one.mean / best if one.mean is not None and best else None
        return RankedMethod(one, self._span(one), times, one.label in close)

    def _span(self, one: Arrival) -> Interval | None:
        if one.mean is None:
            return None
        deviation, freedom = self._known
        if not freedom or one.mean == 0.0:
            return Interval(one.mean, one.mean, one.mean)
        half = t_quantile(freedom) * deviation / math.sqrt(self.seeds)
        return Interval(one.mean, one.mean * math.exp(-half), one.mean * math.exp(half))

    def _pooled(self, methods: Sequence[Arrival]) -> tuple[float, int]:
        """The standard deviation of the noise and its degrees of freedom."""
        if not methods or self.seeds < 2:
            return 0.0, 0
        logs = np.array([self._logs[one.label] for one in methods])
        rest = logs - logs.mean(1, keepdims=True)
        freedom = logs.size - len(logs)
        if len(logs) > 1:
            rest -= rest.mean(0)
            freedom = (len(logs) - 1) * (self.seeds - 1)
        deviation = math.sqrt(float((rest**2).sum()) / freedom)
        return max(deviation, _LEAST_DEVIATION), freedom

    def _close(self) -> set[str]:
        """The first method and those that no test tells from it."""
        if not self._full:
            return set()
        first = self._full[0].label
        contest = [*self._full, *self._some]
        if not self.can_tell:
            return {one.label for one in contest}
        pairs = {
            (one.label, other.label): self._chance(one, other)
            for one, other in combinations(contest, 2)
        }
        told = holm(pairs, self.level)
        others = (one.label for one in contest[1:])
        return {first} | {label for label in others if (first, label) not in told}

    def _chance(self, one: Arrival, other: Arrival) -> float:
        """The probability that noise alone puts two methods so far apart, in either direction."""
        behind = float((self._logs[other.label] - self._logs[one.label]).mean())
        # Lower bounds of times can hide that a method is behind; they cannot show it is ahead.
        if one.mean is None or (other.mean is None and behind <= 0.0):
            return 1.0
        deviation, freedom = self._known if other.mean is not None else self._whole
        return probability_beyond(abs(behind) / (deviation * math.sqrt(2 / self.seeds)), freedom)


def _in_common(arrivals: Sequence[Arrival]) -> tuple[list[Arrival], int]:
    """The times of the seeds that all methods have in common, and the number of these seeds."""
    named = [one.seeds or tuple(range(len(one.seconds))) for one in arrivals]
    common = [seed for seed in (named[0] if named else ()) if all(seed in own for own in named)]
    if not common:
        # The methods cannot be compared, but each still has its times.
        return list(arrivals), 0
    kept: list[Arrival] = []
    for one, own in zip(arrivals, named, strict=True):
        at = [own.index(seed) for seed in common]
        ends = tuple(one.ends[place] for place in at) if one.ends else ()
        seconds = tuple(one.seconds[place] for place in at)
        kept.append(Arrival(one.label, seconds, tuple(common), ends))
    return kept, len(common)


def _order(one: Arrival) -> tuple[float, float]:
    return math.inf if one.mean is None else one.mean, -one.reached / max(1, len(one.seconds))


def _logarithms(one: Arrival) -> Vector:
    ends = one.ends or tuple(0.0 for _ in one.seconds)
    known = [end if own is None else own for own, end in zip(one.seconds, ends, strict=True)]
    return np.log(np.maximum(np.array(known, dtype=float), _LEAST_SECONDS))


def holm(chances: Mapping[tuple[str, str], float], level: float) -> set[tuple[str, str]]:
    """The pairs that differ; the probability that any of them is wrong is at most the level.

    The smallest probability is compared with the level over the number of pairs, the next with the
    level over one less, and so on, until the first that exceeds its limit.
    """
    believed: set[tuple[str, str]] = set()
    for at, pair in enumerate(sorted(chances, key=lambda pair: chances[pair])):
        if chances[pair] > level / (len(chances) - at):
            break
        believed.add(pair)
    return believed


@functools.cache
def t_quantile(freedom: int, confidence: float = 0.95) -> float:
    """The t that |T| stays below with this probability, where T has Student's distribution.

    For integer degrees of freedom the distribution function is a finite sum in the angle
    atan(t / sqrt(n)) (Abramowitz and Stegun 26.7.3 and 26.7.4), which bisection inverts.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _probability_within(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def probability_beyond(t: float, freedom: int) -> float:
    """The probability that |T| exceeds t, where T has Student's distribution."""
    return max(0.0, 1.0 - _probability_within(math.atan(t / math.sqrt(freedom)), freedom))


def _probability_within(angle: float, freedom: int) -> float:
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    term, total = cosine if is_odd else 1.0, 0.0
    for power in range(is_odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
