"""What repeated runs allow us to say: intervals, times to a target, the best rate, the verdict.

Nothing here knows how a run came about; a history is its list of evaluations in order of time.
Whatever is read off a history is accuracy where the task has one, loss (lower is better) elsewhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import ConfigurationError
from gossamer.quantities import counted

History = Sequence[Mapping[str, Any]]
Vector = NDArray[np.float64]
_LOWER_IS_BETTER = frozenset({"loss", "training_loss", "consensus_distance"})
# Scores are 32-bit numbers: 342 right of 360 reads as 0.94999999 and has reached 0.95 all the same.
_ROUNDING = 1e-6
_NAMED = 3
"""Of more methods too close to call a sentence counts the rest."""
_ENOUGH_SEEDS = 3
"""With fewer an interval says more about the number of runs than about the methods."""


@dataclass(frozen=True)
class Interval:
    """A mean and the range that holds the true mean with 95 % confidence."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Arrival:
    """When the runs of one method reach the target: one time a seed, None for a seed that fails."""

    label: str
    seconds: tuple[float | None, ...]

    @property
    def reached(self) -> int:
        """How many seeds reach the target."""
        return sum(second is not None for second in self.seconds)

    @property
    def interval(self) -> Interval | None:
        """The mean time; None unless every seed arrives, as a mean of the lucky ones flatters."""
        known = [second for second in self.seconds if second is not None]
        return interval(known) if known and len(known) == len(self.seconds) else None


def interval(values: Sequence[float]) -> Interval:
    """The mean of a sample and its 95 % Student-t interval; one value is its own interval."""
    if not values:
        raise ConfigurationError("an interval needs at least one value, got none; run a seed first")
    if not all(math.isfinite(value) for value in values):
        return Interval(math.nan, math.nan, math.nan)
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, mean, mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = t_quantile(count - 1) * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half)


@functools.cache
def t_quantile(freedom: int, confidence: float = 0.95) -> float:
    """The t that |T| stays below with this probability, T Student-distributed.

    For whole degrees of freedom the distribution is a finite sum in the angle atan(t / sqrt(n))
    (Abramowitz and Stegun 26.7.3 and 26.7.4). The angle is bounded, so halving always finds it.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _probability_within(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _probability_within(angle: float, freedom: int) -> float:
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    term, total = cosine if is_odd else 1.0, 0.0
    for power in range(is_odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def measure(histories: Sequence[History]) -> str:
    """What these runs are judged by: accuracy if the task has one, else loss."""
    rows = [row for history in histories for row in history]
    return "accuracy" if any(row.get("accuracy") is not None for row in rows) else "loss"


def is_lower_better(key: str) -> bool:
    """Whether a smaller value of this column is the better one."""
    return key in _LOWER_IS_BETTER


def final(history: History, key: str) -> float:
    """The value at the end of the run; not-a-number if it has none."""
    value = history[-1].get(key) if history else None
    return math.nan if value is None else float(value)


def seconds_to(history: History, target: float, key: str = "accuracy") -> float | None:
    """The first virtual time at which `key` reaches the target, None if it never does.

    Between two evaluations the value is taken to move on a straight line.
    """
    sign = -1.0 if is_lower_better(key) else 1.0
    slack = _ROUNDING * abs(target)
    before: tuple[float, float] | None = None
    for row in history:
        score = row.get(key)
        if score is None or not math.isfinite(score):
            continue
        now, short = float(row["virtual_seconds"]), sign * (target - float(score))
        if short <= slack:
            if before is None or short >= 0.0:
                return now
            then, missing = before
            return then + (now - then) * missing / (missing - short)
        before = now, short
    return None


def curve(history: History, key: str, along: str) -> tuple[Vector, Vector]:
    """The finite scores against time or epochs; of evaluations at one moment the last counts."""
    points = {
        float(row[along]): float(row[key])
        for row in history
        if row.get(key) is not None and math.isfinite(row[key])
    }
    return np.array(list(points), dtype=float), np.array(list(points.values()), dtype=float)


def seed_curves(histories: Sequence[History], key: str, along: str) -> tuple[Vector, Vector]:
    """The seeds of a method at common places, as (places, [seeds, places]).

    The places are those of the seed that ended first: beyond them no mean over all seeds exists.
    """
    curves = [found for found in (curve(one, key, along) for one in histories) if len(found[0])]
    if not curves:
        return np.zeros(0), np.zeros((0, 0))
    places = min((xs for xs, _ in curves), key=lambda xs: float(xs[-1]))
    return places, np.stack([np.interp(places, xs, values) for xs, values in curves])


def time_shares(histories: Sequence[History]) -> tuple[float, float, float]:
    """Computing, waiting and neither: shares of the run, mean over workers and seeds."""
    shares: list[tuple[float, float]] = []
    for history in histories:
        last = history[-1]
        total = float(last["virtual_seconds"]) or 1.0
        computing, waiting = last["computing_seconds"], last["waiting_seconds"]
        shares.append((float(np.mean(computing)) / total, float(np.mean(waiting)) / total))
    computed, waited = (float(share) for share in np.mean(shares, axis=0))
    return computed, waited, max(0.0, 1.0 - computed - waited)


def arrival(label: str, histories: Sequence[History], target: float, key: str) -> Arrival:
    """When each seed of a method reaches the target."""
    return Arrival(label, tuple(seconds_to(history, target, key) for history in histories))


def ranked(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The fastest first; then those that arrive with some seeds only, more seeds first."""

    def order(one: Arrival) -> tuple[float, float]:
        mean = math.inf if one.interval is None else one.interval.mean
        return mean, -one.reached / max(1, len(one.seconds))

    return sorted(arrivals, key=order)


def best_of(
    runs: Mapping[float, Sequence[History]], target: float, key: str | None = None
) -> float:
    """The learning rate to show for a method, from its runs (one a seed) at each rate of a grid.

    The rate with the highest mean accuracy at the end of the run (or the lowest mean loss) wins;
    among equals the one that reaches the target sooner on average, then the smaller one. A rate
    with a run that ended without a finite value comes last.
    """
    if not runs or not all(runs.values()):
        without = [rate for rate, histories in runs.items() if not histories]
        raise ConfigurationError(
            "best_of needs a run for each learning rate of the grid, got none for "
            f"{without or 'any'}; run the grid first"
        )
    chosen = key or measure([history for histories in runs.values() for history in histories])

    def order(rate: float) -> tuple[float, float, float]:
        histories = runs[rate]
        mean = interval([final(history, chosen) for history in histories]).mean
        worse = mean if is_lower_better(chosen) else -mean
        # Six figures: means of the same scores in another order are a tie, not a victory.
        worse = math.inf if math.isnan(mean) else float(f"{worse:.6g}")
        arrived = arrival("", histories, target, chosen).interval
        return worse, math.inf if arrived is None else arrived.mean, rate

    return min(runs, key=order)


def verdict(runs: Mapping[str, Sequence[History]], target: float, key: str | None = None) -> str:
    """One sentence on who reaches the target first, as far as the runs allow one.

    `runs` holds the histories of each method, one a seed. Two methods whose 95 % intervals of the
    time overlap are too close to call; a method counts only if all of its seeds reach the target.
    """
    if not runs or not all(runs.values()):
        raise ConfigurationError(
            "verdict needs at least one run of each method, got none; run the comparison first"
        )
    chosen = key or measure([history for histories in runs.values() for history in histories])
    ranking = ranked([arrival(name, runs[name], target, chosen) for name in runs])
    there = [(one, one.interval) for one in ranking if one.interval is not None]
    missing = [one for one in ranking if one.interval is None]
    goal = show_score(target, chosen)
    if not there:
        return _nobody(runs, missing, goal, chosen)
    leader, best = there[0]
    close = [one for one, span in there if span.low <= best.high]
    rest = [(one.label, span.mean) for one, span in there if span.low > best.high]
    if len(close) > 1:
        timed = [f"{one.label} ({_show_span(one, ', {}')})" for one in close]
        if len(timed) > _NAMED:
            timed[_NAMED:] = [f"{len(timed) - _NAMED} more"]
        hint = "; more seeds would tell" if len(leader.seconds) < _ENOUGH_SEEDS else ""
        parts = [f"Too close to call between {_enumerate(timed)} on the way to {goal}{hint}"]
    elif len(runs) == 1:
        parts = [f"{leader.label} reaches {goal} after {_show_span(leader)}"]
    elif len(there) == 1:
        fully = " with every seed" if any(one.reached for one in missing) else ""
        parts = [f"Only {leader.label} reaches {goal}{fully}, after {_show_span(leader)}"]
    else:
        parts = [f"{leader.label} reaches {goal} first, after {_show_span(leader)}"]
    if rest:
        parts.append(_followers(rest, best.mean))
    return "; ".join(parts + _shortfalls(missing)) + "."


def _nobody(
    runs: Mapping[str, Sequence[History]], missing: Sequence[Arrival], goal: str, key: str
) -> str:
    if missing[0].reached:
        some = [f"{_show_count(one)} of {one.label}" for one in missing if one.reached]
        return f"No method reaches {goal} with every seed; {_enumerate(some)} do."
    means = {name: interval([final(run, key) for run in runs[name]]).mean for name in runs}
    known = {name: mean for name, mean in means.items() if not math.isnan(mean)}
    if not known:
        return f"No method reaches {goal}; every one of them diverged."
    nearest = (min if is_lower_better(key) else max)(known, key=lambda name: known[name])
    return (
        f"No method reaches {goal}; {nearest} ends nearest, at {show_score(known[nearest], key)}."
    )


def _followers(rest: Sequence[tuple[str, float]], best: float) -> str:
    def longer(mean: float) -> str:
        # A target met before the first step makes every ratio meaningless.
        return f"needs {show_number(mean)} s" + (
            f", {mean / best:.1f} times as long" if best > 0.0 else ""
        )

    (second, sooner), (last, latest) = rest[0], rest[-1]
    if len(rest) == 1:
        return f"{second} {longer(sooner)}"
    return f"next is {second} with {show_number(sooner)} s, last is {last}, which {longer(latest)}"


def _shortfalls(missing: Sequence[Arrival]) -> list[str]:
    parts: list[str] = []
    some = [f"{one.label} ({_show_count(one)})" for one in missing if one.reached]
    never = [one.label for one in missing if not one.reached]
    if some:
        parts.append(f"{_enumerate(some)} {_agree(some, 'reach')} it with some seeds only")
    if never:
        parts.append(f"{_enumerate(never)} {_agree(never, 'do')} not reach it")
    return parts


def _agree(subjects: Sequence[str], verb: str) -> str:
    return f"{verb}es" if len(subjects) == 1 else verb


def _show_count(one: Arrival) -> str:
    return f"{one.reached} of {counted(len(one.seconds), 'seed')}"


def _show_span(one: Arrival, around: str = " ({})") -> str:
    span = one.interval
    assert span is not None
    if len(one.seconds) == 1:
        return f"{show_number(span.mean)} s in its only run"
    # With few seeds the interval can pass zero; no run takes less than no time.
    low, high = show_number(max(0.0, span.low)), show_number(span.high)
    return f"{show_number(span.mean)} s" + around.format(f"{low}-{high} s")


def _enumerate(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def show_number(value: float) -> str:
    """Three figures, written out: 0.823, 12.3, 4,570."""
    return f"{value:,.0f}" if abs(value) >= 999.5 or value == 0 else f"{value:#.3g}".rstrip(".")


def show_score(value: float, key: str) -> str:
    """A score as people say it: 95 % for an accuracy, 'a loss of 0.1' for a loss."""
    if key.endswith("accuracy"):
        return f"{round(100 * value, 2):g} %"
    return f"a {key.replace('_', ' ')} of {value:.4g}"
