"""What is read off runs: intervals, scores at the end, mean curves, the best learning rate.

Nothing here knows how a run came about; a history is its list of evaluations in order of time.
Whatever is read off a history is accuracy where the task has one, a metric of the task's own where
its rows name one, loss (lower is better) elsewhere.
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


def measure(histories: Sequence[History]) -> str:
    """What these runs are judged by: the metric that the task names, accuracy if it has one, else
    loss."""
    rows = [row for history in histories for row in history]
    for row in rows:
        if row.get("score") is not None:
            return ScoreKey(row["score"], bool(row.get("lower_is_better")))
    return "accuracy" if any(row.get("accuracy") is not None for row in rows) else "loss"


def final(history: History, key: str) -> float:
    """The value at the end of the run; not-a-number if it has none."""
    value = history[-1].get(key) if history else None
    return math.nan if value is None else float(value)


_MANY = 40
"""Evaluations of a run; of fewer each is drawn as it is."""


def curve(history: History, key: str, along: str) -> tuple[Vector, Vector]:
    """The finite scores against time or epochs; of evaluations at one moment the last counts."""
    points = {
        float(row[along]): float(row[key])
        for row in history
        if row.get(key) is not None and math.isfinite(row[key])
    }
    return np.array(list(points), dtype=float), np.array(list(points.values()), dtype=float)


def averaged_curve(history: History, key: str, along: str) -> tuple[Vector, Vector]:
    """Like `curve`, each score averaged over the epochs around its evaluation."""
    epochs, _ = curve(history, key, "epochs")
    if not len(epochs):
        return epochs, epochs
    epochs = np.sort(epochs)
    places, seconds, averages = smoothed(history, key)
    at = np.interp(epochs, places, seconds) if along == "virtual_seconds" else epochs
    return at, np.interp(epochs, places, averages)


def seed_curves(histories: Sequence[History], key: str, along: str) -> tuple[Vector, Vector]:
    """The seeds of a method at common places, as (places, [seeds, places]).

    The places are those of the seed that ended last. One that ended before keeps its last value: a
    run that stops at its target has it from then on. Scores that were taken often are averaged
    around each evaluation as the rule for reaching a target does it: one alone is mostly noise.
    """
    is_score = key in ("accuracy", "loss") or isinstance(key, ScoreKey)
    drawn = [
        (averaged_curve if is_score and len(one) >= _MANY else curve)(one, key, along)
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
    """The learning rate of a method, from its runs (one a seed) at each rate of a grid.

    What is ranked decides: the rate that reaches the target soonest. One that does not with every
    seed comes later than all that do, then the better score at the end counts, then the smaller
    rate; a rate with a run that ended without a finite value comes last.
    """
    if not runs or not all(runs.values()):
        without = [rate for rate, histories in runs.items() if not histories]
        raise ConfigurationError(
            "best_rate needs a run for each learning rate of the grid, got none for "
            f"{without or 'any'}; run the grid first"
        )
    chosen = key or measure([history for histories in runs.values() for history in histories])

    def order(rate: float) -> tuple[float, bool, int, float, float]:
        arrived = arrival("", runs[rate], target, chosen)
        mean = interval([final(history, chosen) for history in runs[rate]]).mean
        worse = mean if is_lower_better(chosen) else -mean
        # Six figures: means of the same scores in another order are a tie, not a victory.
        worse = math.inf if math.isnan(mean) else float(f"{worse:.6g}")
        soonest = math.inf if arrived.mean is None else arrived.mean
        return soonest, math.isnan(mean), -arrived.reached, worse, rate

    return min(runs, key=order)


def beyond(rate: float, rates: Sequence[float]) -> float | None:
    """The next rate where this one is the outermost of a grid; None where it is not."""
    grid = sorted(set(rates))
    if len(grid) < 2 or rate not in (grid[0], grid[-1]):
        return None
    ratio = grid[0] / grid[1] if rate == grid[0] else grid[-1] / grid[-2]
    return float(f"{rate * ratio:.2g}")


def show_number(value: float) -> str:
    """Three figures, written out: 0.823, 12.3, 4,570."""
    return f"{value:,.0f}" if abs(value) >= 999.5 or value == 0 else f"{value:#.3g}".rstrip(".")


def show_score(value: float, key: str) -> str:
    """A score as people say it: 95 % for an accuracy, 'a loss of 0.1' for a loss."""
    if key.endswith("accuracy"):
        return f"{round(100 * value, 2):g} %"
    return f"a {key.replace('_', ' ')} of {value:.4g}"
