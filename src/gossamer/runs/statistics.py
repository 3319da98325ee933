"""Statistics of runs: intervals, scores at the end, mean curves, the best learning rate.

A history is the list of a run's evaluations in order of time. Runs are judged by accuracy if the
task has one, by a metric of the task's own if the rows name one, otherwise by loss (lower is
better).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from gossamer.errors import ConfigurationError
from gossamer.runs.arrival import History, Vector, arrival, is_lower_better, smoothed
from gossamer.runs.ranking import Interval, t_quantile
from gossamer.tasks.metric import ScoreKey


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


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean; None unless every value is known."""
    known = [value for value in values if value is not None]
    return interval(known).mean if known and len(known) == len(values) else None


def measure(histories: Sequence[History]) -> str:
    """The score by which these runs are judged: the metric that their rows name, accuracy if the
    task has one, else loss."""
    rows = [row for history in histories for row in history]
    for row in rows:
        if row.get("score") is not None:
            return ScoreKey(row["score"], bool(row.get("lower_is_better")))
    return "accuracy" if any(row.get("accuracy") is not None for row in rows) else "loss"


def final(history: History, key: str) -> float:
    """The value at the end of the run; NaN if there is none."""
    value = history[-1].get(key) if history else None
    return math.nan if value is None else float(value)


def final_mean(histories: Sequence[History], key: str) -> float:
    """The mean over the seeds of the value at the end; NaN if one of the runs has none."""
    return interval([final(history, key) for history in histories]).mean


_MANY = 40
"""A curve with fewer evaluations than this is drawn without averaging."""


def curve(history: History, key: str, along: str) -> tuple[Vector, Vector]:
    """The finite scores against time or epochs; the last of several at one moment counts."""
    points = {
        float(row[along]): float(row[key])
        for row in history
        if row.get(key) is not None and math.isfinite(row[key])
    }
    return np.array(list(points), dtype=float), np.array(list(points.values()), dtype=float)


def _averaged_curve(history: History, key: str, along: str) -> tuple[Vector, Vector]:
    """Like `curve`, each score averaged over the epochs around its evaluation."""
    epochs, _ = curve(history, key, "epochs")
    if not len(epochs):
        return epochs, epochs
    epochs = np.sort(epochs)
    places, seconds, averages = smoothed(history, key)
    at = np.interp(epochs, places, seconds) if along == "virtual_seconds" else epochs
    return at, np.interp(epochs, places, averages)


def seed_curves(histories: Sequence[History], key: str, along: str) -> tuple[Vector, Vector]:
    """The curves of a method's seeds at common places, as (places, [seeds, places]).

    The places are those of the seed that ended last. A seed that ended earlier keeps its last
    value, as a run that stops at its target holds it. Frequent scores are averaged around each
    evaluation, as in the rule for reaching a target, because a single one is mostly noise.
    """
    is_score = key in ("accuracy", "loss") or isinstance(key, ScoreKey)
    drawn = [
        (_averaged_curve if is_score and len(one) >= _MANY else curve)(one, key, along)
        for one in histories
    ]
    curves = [found for found in drawn if len(found[0])]
    if not curves:
        return np.zeros(0), np.zeros((0, 0))
    places = max((xs for xs, _ in curves), key=lambda xs: float(xs[-1]))
    return places, np.stack([np.interp(places, xs, values) for xs, values in curves])


def best_rate(
    runs: Mapping[float, Sequence[History]], target: float, key: str | None = None
) -> float:
    """The best learning rate of a method, from its runs (one for each seed) at each rate.

    The rate that reaches the target soonest is the best. A rate that misses the target with some
    seed comes after all that never miss it; among these more seeds that reach it count first, then
    the better score at the end, then the smaller rate. A rate with a run that ended without a
    finite score comes last.
    """
    chosen = key or measure([history for histories in runs.values() for history in histories])

    def order(rate: float) -> tuple[float, bool, int, float, float]:
        arrived = arrival("", runs[rate], target, chosen)
        mean = final_mean(runs[rate], chosen)
        worse = mean if is_lower_better(chosen) else -mean
        # Rounded, so that means of the same scores in another order are a tie.
        worse = math.inf if math.isnan(mean) else float(f"{worse:.6g}")
        soonest = math.inf if arrived.mean is None else arrived.mean
        return soonest, math.isnan(mean), -arrived.reached, worse, rate

    return min(runs, key=order)


def beyond(rate: float, rates: Sequence[float]) -> float | None:
    """The next rate outside the grid if this rate is at its edge, otherwise None."""
    grid = sorted(set(rates))
    if len(grid) < 2 or rate not in (grid[0], grid[-1]):
        return None
    ratio = grid[0] / grid[1] if rate == grid[0] else grid[-1] / grid[-2]
    return float(f"{rate * ratio:.2g}")


def show_number(value: float) -> str:
    """A number with three digits, without an exponent: 0.823, 12.3, 4,570."""
    return f"{value:,.0f}" if abs(value) >= 999.5 or value == 0 else f"{value:#.3g}".rstrip(".")


def show_score(value: float, key: str) -> str:
    """A score in words: '95 %' for an accuracy, 'a loss of 0.1' for a loss."""
    if key.endswith("accuracy"):
        return f"{round(100 * value, 2):g} %"
    return f"a {key.replace('_', ' ')} of {value:.4g}"
