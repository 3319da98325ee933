"""Compute times that vary: their mean, and the expected slowest of several.

A worker that waits for all others waits for the slowest of n draws. The expected k-th smallest of n
follows from the distribution function F: E X_(k) = integral of P(Binomial(n, F(x)) < k), evaluated
here by quadrature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gossamer.config.cluster import Compute

Values = NDArray[np.float64]
_POINTS = 4001


@dataclass(frozen=True)
class ComputeTime:
    """The compute time per step of one end of a method: a worker, or a group of workers."""

    compute: Compute
    members: int = 1
    """The workers of the end, which has its gradient when the slowest of them is ready."""
    extra_s: float = 0.0
    """The time to broadcast the parameters and to average gradients inside a group."""

    @property
    def is_constant(self) -> bool:
        return deviation(self.compute) == 0.0

    @property
    def mean_s(self) -> float:
        """The mean time of one step, including copying and applying."""
        return self.gradient_s(1) + self.compute.unoverlapped_seconds

    def latest_s(self, ends: int) -> float:
        """The expected time of the slowest of this many ends."""
        return self.gradient_s(ends) + self.compute.unoverlapped_seconds

    def gradient_s(self, ends: int) -> float:
        """The same without copying and applying."""
        count = ends * self.members
        return self.extra_s + order_means(self.compute, count)[-1]

    def in_order_s(self, ends: int) -> list[float]:
        """The expected times of all ends, from the fastest to the slowest."""
        if self.members > 1:
            return [self.latest_s(ends)] * ends
        after = self.extra_s + self.compute.unoverlapped_seconds
        return [mean + after for mean in order_means(self.compute, ends)]

    def latest_sum_s(self, ends: int, steps: int) -> float:
        """The expected time of the end that is slowest over this many steps, by a normal sum."""
        if steps == 1:
            return self.latest_s(ends)
        if self.members > 1:
            return steps * self.latest_s(ends)
        spread = deviation(self.compute) * math.sqrt(steps)
        return steps * self.mean_s + spread * expected_largest_normal(ends)


def deviation(compute: Compute) -> float:
    """The standard deviation of one compute time."""
    chance = compute.pause_probability
    pauses = chance * (1 - chance) * compute.pause_seconds**2
    match compute.distribution:
        case "constant":
            own = 0.0
        case "exponential":
            own = compute.seconds
        case "uniform":
            own = compute.seconds * min(compute.jitter, 1 / math.sqrt(3))
        case _:
            own = compute.seconds * compute.jitter
    return math.sqrt(own * own + pauses)


def _mean_s(compute: Compute) -> float:
    mean = compute.seconds
    if compute.distribution == "normal" and compute.jitter:
        # Draws below a tenth of the mean are raised to it.
        spread, least = compute.jitter * mean, 0.1 * mean
        far = (mean - least) / spread
        density = math.exp(-far * far / 2) / math.sqrt(2 * math.pi)
        below = 0.5 * math.erfc(far / math.sqrt(2))
        mean = least * below + mean * (1 - below) + spread * density
    return mean + compute.pause_probability * compute.pause_seconds


@lru_cache(maxsize=1024)
def expected_largest_normal(count: int) -> float:
    """The expected maximum of so many standard normal numbers."""
    standard = Compute(seconds=20.0, distribution="normal", jitter=1 / 20)
    return order_means(standard, count)[-1] - 20.0


@lru_cache(maxsize=1024)
def order_means(compute: Compute, count: int) -> tuple[float, ...]:
    """The expected compute times of so many workers, from the fastest to the slowest."""
    mean = _mean_s(compute)
    if deviation(compute) == 0.0:
        return (mean,) * count
    # Draws beyond this end are negligible, even for the exponential with its long tail.
    far = math.log(count) + 30.0
    end = mean + compute.pause_seconds + far * deviation(compute)
    grid = np.linspace(0.0, end, _POINTS)
    below = distribution_function(compute, grid)
    if count == 1:
        return (mean,)
    # P(exactly k of n are below x), cumulated over k, is the chance that X_(k+1) is above x.
    with np.errstate(divide="ignore"):
        log_below, log_above = np.log(below), np.log1p(-below)
    survival = np.zeros_like(grid)
    means: list[float] = []
    for at in range(count):
        ways = math.lgamma(count + 1) - math.lgamma(at + 1) - math.lgamma(count - at + 1)
        survival = survival + np.exp(ways + _times(at, log_below) + _times(count - at, log_above))
        means.append(float(np.trapezoid(survival, grid)))
    return tuple(means)


def _times(count: int, logarithm: Values) -> Values:
    """A count times a logarithm, where 0 times minus infinity is 0."""
    return count * logarithm if count else np.zeros_like(logarithm)


def distribution_function(compute: Compute, grid: Values) -> Values:
    """F(x): the chance that a compute time, pauses included, is at most x."""
    chance = compute.pause_probability
    value = (1 - chance) * _plain(compute, grid)
    if chance:
        value = value + chance * _plain(compute, grid - compute.pause_seconds)
    return np.clip(value, 0.0, 1.0)


def _plain(compute: Compute, grid: Values) -> Values:
    mean, spread = compute.seconds, compute.jitter
    match compute.distribution:
        case "normal" if spread:
            return _normal((grid - mean) / (spread * mean)) * (grid >= 0.1 * mean)
        case "lognormal" if spread:
            variance = math.log1p(spread * spread)
            positive = np.maximum(grid, 1e-300)
            return _normal((np.log(positive / mean) + variance / 2) / math.sqrt(variance))
        case "uniform" if spread:
            half = min(1.0, spread * math.sqrt(3))
            return np.clip((grid / mean - 1 + half) / (2 * half), 0.0, 1.0)
        case "exponential":
            return -np.expm1(-np.maximum(grid, 0.0) / mean)
        case _:
            return np.where(grid >= mean, 1.0, 0.0)


def _normal(at: Values) -> Values:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in at])
