"""Fits recover what samples were drawn from."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.config.cluster import Compute
from gossamer.plan.probe.fit import CONSTANT_BELOW, fit

COUNT = 3000
LAW = settings(max_examples=30)
SEEDS = st.integers(0, 10_000)
SCALES = st.floats(1e-5, 10.0)


def drawn(compute: Compute, seed: int, count: int = COUNT) -> list[float]:
    rng = random.Random(seed)
    return [compute.draw(rng) for _ in range(count)]


@LAW
@given(SEEDS, SCALES, st.floats(0.05, 0.3))
def test_normal_steps_are_recognised(seed: int, scale: float, jitter: float) -> None:
    """Mean and spread come back; a narrow normal may pass for a lognormal, which it resembles."""
    found = fit(drawn(Compute(seconds=scale, distribution="normal", jitter=jitter), seed))
    assert found.distribution == "normal" or (jitter < 0.1 and found.distribution == "lognormal")
    assert found.seconds == pytest.approx(scale, rel=0.03)
    assert found.jitter == pytest.approx(jitter, rel=0.1)
    assert found.pause_probability < 0.002


@LAW
@given(SEEDS, SCALES, st.floats(0.15, 0.8))
def test_lognormal_steps_are_recognised(seed: int, scale: float, jitter: float) -> None:
    """Its long tail is its own, not a row of pauses."""
    found = fit(drawn(Compute(seconds=scale, distribution="lognormal", jitter=jitter), seed))
    assert found.distribution == "lognormal"
    assert found.seconds == pytest.approx(scale, rel=0.08)
    assert found.jitter == pytest.approx(jitter, rel=0.25)
    assert found.pause_probability < 0.002


@LAW
@given(SEEDS, SCALES)
def test_exponential_steps_are_recognised(seed: int, scale: float) -> None:
    """By their shape; their spread follows from it."""
    found = fit(drawn(Compute(seconds=scale, distribution="exponential"), seed))
    assert found.distribution == "exponential"
    assert found.seconds == pytest.approx(scale, rel=0.1)


@LAW
@given(SCALES, st.integers(1, 200))
def test_equal_steps_are_constant(scale: float, count: int) -> None:
    """Also a single one."""
    found = fit([scale] * count)
    assert (found.distribution, found.jitter, found.pause_probability) == ("constant", 0.0, 0.0)
    assert found.seconds == pytest.approx(scale)


@LAW
@given(
    SEEDS,
    st.sampled_from(["constant", "normal", "lognormal"]),
    st.floats(0.02, 0.1),
    st.floats(3.0, 30.0),
)
def test_pauses_are_told_from_steps(seed: int, name: str, share: float, length: float) -> None:
    """How often and how long, and what the steps are without them."""
    compute = Compute(
        seconds=0.01, distribution=name, jitter=0.1, pause_probability=share,
        pause_seconds=0.01 * length,
    )  # fmt: skip
    found = fit(drawn(compute, seed))
    assert found.pause_probability == pytest.approx(share, abs=0.02)
    assert found.pause_seconds == pytest.approx(0.01 * length, rel=0.05)
    assert found.seconds == pytest.approx(0.01, rel=0.03)
    assert found.jitter == pytest.approx(0.0 if name == "constant" else 0.1, abs=0.02)


@LAW
@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=300))
def test_the_mean_of_a_fit_is_the_mean_of_the_samples(samples: list[float]) -> None:
    """Whatever the samples are: throughput follows from the mean, and none of it may get lost."""
    found = fit(samples)
    mean = found.seconds + found.pause_probability * found.pause_seconds
    assert mean == pytest.approx(statistics.fmean(samples), rel=1e-9)
    assert found.jitter == 0 or found.jitter >= CONSTANT_BELOW
    assert 0 <= found.pause_probability <= 0.2
    assert found.pause_seconds >= 0


@pytest.mark.parametrize("samples", [[], [0.0], [-1.0, 2.0], [float("nan")]])
def test_no_fit_of_impossible_times(samples: list[float]) -> None:
    """A clock never shows these."""
    with pytest.raises(ValueError, match="a time above 0"):
        fit(samples)
