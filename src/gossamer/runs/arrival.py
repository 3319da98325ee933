"""When a run reaches its target: one rule for every command, and how often a run is evaluated.

A score on a few hundred samples fluctuates, so the first evaluation at the target is luck, and more
evaluations mean more luck. The score is therefore averaged over the epochs around a moment, from
15 % before it to 15 % after it. The width is proportional because times are compared by their
ratios. The run reaches the target at the first moment at which that average is at or beyond the
target, on a straight line between two evaluations, provided that the run also ends there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import ConfigurationError
from gossamer.tasks.metric import ScoreKey

History = Sequence[Mapping[str, Any]]
Vector = NDArray[np.float64]
AROUND = 0.15
RULE = (
    f"A run reaches the target when its score, averaged over the epochs from {100 * AROUND:g} % "
    f"before a moment to {100 * AROUND:g} % after it, is first at or beyond it, provided that the "
    "run also ends so."
)
_EVALUATIONS_PER_EPOCH = 5
_EVALUATIONS = (20, 100)
_LOWER_IS_BETTER = frozenset({"loss", "training_loss", "consensus_distance"})
# Scores are 32-bit numbers: 342 right of 360 reads as 0.94999999, which must count as 0.95.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Arrival:
    """When the runs of one method reach the target: a time for each seed, None if it never does."""

    label: str
    seconds: tuple[float | None, ...]
    seeds: tuple[object, ...] = ()
    """The seed of each time; if empty, the times are matched by their order."""
    ends: tuple[float, ...] = ()
    """When each run was evaluated last: a target that was not reached comes later."""

    @property
    def reached(self) -> int:
        """How many seeds reach the target."""
        return sum(second is not None for second in self.seconds)

    @property
    def mean(self) -> float | None:
        """The geometric mean; None unless every seed arrives: the lucky ones alone would flatter.

        Times are compared by their ratios, so their logarithms are averaged.
        """
        known = [second for second in self.seconds if second is not None]
        if not known or len(known) < len(self.seconds):
            return None
        if min(known) <= 0.0:
            return 0.0
        return math.exp(math.fsum(math.log(second) for second in known) / len(known))


def evaluations(epochs: float) -> int:
    """The evaluations of a run: twice as many move a time to the target by a few per cent only."""
    fewest, most = _EVALUATIONS
    return min(most, max(fewest, round(_EVALUATIONS_PER_EPOCH * epochs)))


def is_lower_better(key: str) -> bool:
    """Whether a smaller value of this column is the better one."""
    return key.is_lower_better if isinstance(key, ScoreKey) else key in _LOWER_IS_BETTER


def smoothed(history: History, key: str) -> tuple[Vector, Vector, Vector]:
    """The score averaged around each moment, as (epochs, seconds, averages).

    At both ends of a run the average covers the epochs that exist. Rows without a finite score are
    skipped; the last of several rows with the same number of epochs counts.
    """
    found = {
        float(row["epochs"]): (float(row["virtual_seconds"]), float(row[key]))
        for row in history
        if row.get(key) is not None and math.isfinite(row[key])
    }
    epochs = np.array(sorted(found), dtype=float)
    if not len(epochs):
        return epochs, epochs, epochs
    times, scores = np.array([found[at] for at in epochs], dtype=float).T
    # The average is smooth except where its window begins or ends at an evaluation.
    bends = np.unique(np.concatenate([epochs, epochs / (1 + AROUND), epochs / (1 - AROUND)]))
    places = bends[(bends >= epochs[0]) & (bends <= epochs[-1])]
    low = np.maximum(places * (1 - AROUND), epochs[0])
    high = np.minimum(places * (1 + AROUND), epochs[-1])
    width = high - low
    areas = _area(epochs, scores, high) - _area(epochs, scores, low)
    at_once = np.interp(places, epochs, scores)
    averages = np.where(width > 0.0, areas / np.where(width > 0.0, width, 1.0), at_once)
    return places, np.interp(places, epochs, times), averages


def _area(places: Vector, values: Vector, ends: Vector) -> Vector:
    """The area below the straight lines through the values, from the first place to each end."""
    pieces = np.diff(places) * (values[1:] + values[:-1]) / 2
    whole = np.concatenate([[0.0], np.cumsum(pieces)])
    before = np.clip(np.searchsorted(places, ends, side="right") - 1, 0, len(places) - 1)
    height = np.interp(ends, places, values)
    return whole[before] + (ends - places[before]) * (values[before] + height) / 2


def moment(history: History, target: float, key: str) -> tuple[float, float] | None:
    """The epochs and the seconds at which the target is reached; None if it is not, or not held."""
    if math.isnan(held_at_the_end(history, key)):
        return None
    places, times, averages = smoothed(history, key)
    missing = _missing(averages, target, key)
    is_there = missing <= _ROUNDING * abs(target)
    if not is_there[-1]:
        return None
    at = int(np.argmax(is_there))
    if at == 0 or missing[at] >= 0.0:
        return float(places[at]), float(times[at])
    share = missing[at - 1] / (missing[at - 1] - missing[at])
    epochs, seconds = (
        float(values[at - 1] + (values[at] - values[at - 1]) * share) for values in (places, times)
    )
    return epochs, seconds


def _missing(scores: Vector, target: float, key: str) -> Vector:
    """How far the scores are from the target; zero or below where they have reached it."""
    return scores - target if is_lower_better(key) else target - scores


def held_at_the_end(history: History, key: str) -> float:
    """The score averaged over the last epochs of a run; NaN if the run ends without a score."""
    last = history[-1].get(key) if history else None
    if last is None or not math.isfinite(last):
        return math.nan
    return float(smoothed(history, key)[2][-1])


def seconds_to(history: History, target: float, key: str = "accuracy") -> float | None:
    """When the target is reached; None if it is never reached, or is lost again."""
    found = moment(history, target, key)
    return None if found is None else found[1]


def has_lasted(history: History, target: float, key: str) -> bool:
    """Whether a run under way has reached the target for good: no later row moves that moment."""
    last = history[-1].get(key) if history else None
    if last is None or not _missing(last, target, key) <= _ROUNDING * abs(target):
        return False
    found = moment(history, target, key)
    return found is not None and found[0] * (1 + AROUND) <= float(history[-1]["epochs"])


def arrival(
    label: str,
    histories: Sequence[History],
    target: float,
    key: str,
    seeds: Sequence[object] = (),
) -> Arrival:
    """When each seed of a method reaches the target."""
    return Arrival(
        label,
        tuple(seconds_to(history, target, key) for history in histories),
        tuple(seeds),
        tuple(float(history[-1]["virtual_seconds"]) if history else 0.0 for history in histories),
    )


def charged(
    history: History, extra_s: float, per_second: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """The same evaluations, each later by the time that it takes to have the model it scored, and
    dearer by what such a second costs."""
    extra = {"virtual_seconds": extra_s}
    extra |= {what: extra_s * rate for what, rate in (per_second or {}).items()}
    return [
        {**row, **{what: row[what] + more for what, more in extra.items() if what in row}}
        for row in history
    ]


def target_of(target: float | None, *, score: str) -> float | None:
    """Check a target. An accuracy is a share, and a number above 1 is meant in per cent."""
    if target is None:
        return None
    has_accuracy = score == "accuracy"
    if score not in ("accuracy", "loss"):
        if not math.isfinite(target):
            raise ConfigurationError(f"--target must be a finite {score}, got {target:g}")
        return target
    if has_accuracy and 1 < target <= 100:
        return target / 100
    if not math.isfinite(target) or target <= 0 or (has_accuracy and target > 1):
        expected = (
            "an accuracy above 0 and at most 1 (or in per cent, at most 100)"
            if has_accuracy
            else "a loss above 0"
        )
        raise ConfigurationError(f"--target must be {expected}, got {target:g}")
    return target
