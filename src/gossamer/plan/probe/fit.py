"""The distribution that step times follow, and which of the steps were pauses.

For each family of distributions the body is estimated from quartiles, which a few long steps do not
move, and steps that the body could hardly have produced count as pauses. The family with the
largest likelihood is chosen. The mean and the spread are those of the steps that were no pauses, so
that the mean of the description is the mean of the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float64]

CONSTANT_BELOW = 0.01
"""A spread below this share of the mean counts as none."""
FEWEST = 20
"""With fewer samples quartiles say little, so mean and spread are taken directly."""
LEAST_PAUSE = 1.5
"""A step with a pause takes at least this many times the median."""
MOST_PAUSES = 0.2
"""If more steps than this share are long, they are not pauses."""
_SURPRISE = 0.01
"""The expected number of steps of the body beyond the limit, among all samples."""
_QUARTILES = 2 * NormalDist().inv_cdf(0.75)


@dataclass(frozen=True)
class Fit:
    """A fitted distribution, in the terms of a cluster's `Compute`."""

    distribution: str
    seconds: float
    jitter: float
    pause_probability: float = 0.0
    pause_seconds: float = 0.0


@dataclass(frozen=True)
class _Family:
    """A family of distributions: the limit of its body, and the log-likelihood of samples."""

    name: str
    limit: Callable[[Samples], float]
    likelihood: Callable[[Samples], float]


def fit(samples: Sequence[float]) -> Fit:
    """The distribution under which these step times are most likely."""
    times = np.sort(np.asarray(samples, dtype=np.float64))
    if len(times) == 0 or not bool(np.all(np.isfinite(times))) or times[0] <= 0:
        raise ValueError("a fit needs at least one step, each with a time above 0")
    if len(times) < FEWEST:
        return _described("normal", times, times[:0])
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75])
    if (high - low) / _QUARTILES < CONSTANT_BELOW * middle:
        kept, paused = _parted(times, LEAST_PAUSE * middle)
        return _described("constant", kept, paused)
    found = [(_score(times, family), family) for family in _FAMILIES]
    best = max(found, key=lambda one: one[0])[1]
    return _described(best.name, *_parted(times, best.limit(times)))


def _described(name: str, kept: Samples, paused: Samples) -> Fit:
    mean = float(kept.mean())
    spread = float(kept.std(ddof=1)) / mean if len(kept) > 1 else 0.0
    if spread < CONSTANT_BELOW:
        name = "constant"
    if name == "constant":
        spread = 0.0
    if len(paused) == 0:
        return Fit(name, mean, spread)
    share = len(paused) / (len(kept) + len(paused))
    return Fit(name, mean, spread, share, float(paused.mean()) - mean)


def _parted(times: Samples, limit: float) -> tuple[Samples, Samples]:
    """The body and the pauses of sorted samples."""
    limit = max(limit, LEAST_PAUSE * float(times[len(times) // 2]))
    cut = int(np.searchsorted(times, limit, side="right"))
    if len(times) - cut > MOST_PAUSES * len(times):
        cut = len(times)
    return times[:cut], times[cut:]


def _score(times: Samples, family: _Family) -> float:
    """The log-likelihood of all samples, pauses included."""
    kept, paused = _parted(times, family.limit(times))
    score = family.likelihood(kept)
    if len(paused) == 0:
        return score
    # The length of a pause beyond the limit is exponential in every family.
    share, begin = len(paused) / len(times), float(kept[-1])
    excess = max(float(paused.mean()) - begin, 1e-9 * begin)
    score += len(kept) * math.log1p(-share) + len(paused) * (math.log(share / excess) - 1.0)
    return score - math.log(len(times))  # Schwarz's criterion for two more parameters


def _surprising(count: int) -> float:
    """The standard deviations beyond which hardly any of so many normal samples lies."""
    return NormalDist().inv_cdf(1.0 - _SURPRISE / count)


def _quartile_deviation(times: Samples) -> float:
    low, high = np.quantile(times, [0.25, 0.75])
    return float(high - low) / _QUARTILES


def _normal_limit(times: Samples) -> float:
    return float(np.median(times)) + _surprising(len(times)) * _quartile_deviation(times)


def _lognormal_limit(times: Samples) -> float:
    return math.exp(min(_normal_limit(np.log(times)), 700.0))


def _exponential_limit(times: Samples) -> float:
    return float(np.median(times)) / math.log(2.0) * math.log(len(times) / _SURPRISE)


def _normal_likelihood(times: Samples) -> float:
    deviation = max(float(times.std()), 1e-12 * float(times.mean()))
    return -len(times) * (math.log(deviation) + 0.5 * math.log(2 * math.pi) + 0.5)


def _lognormal_likelihood(times: Samples) -> float:
    logarithms = np.log(times)
    deviation = max(float(logarithms.std()), 1e-12)
    body = -len(times) * (math.log(deviation) + 0.5 * math.log(2 * math.pi) + 0.5)
    return body - float(logarithms.sum())


def _exponential_likelihood(times: Samples) -> float:
    # The exponential has one parameter fewer than the others.
    return -len(times) * (math.log(float(times.mean())) + 1.0) + 0.5 * math.log(len(times))


_FAMILIES = (
    _Family("normal", _normal_limit, _normal_likelihood),
    _Family("lognormal", _lognormal_limit, _lognormal_likelihood),
    _Family("exponential", _exponential_limit, _exponential_likelihood),
)
