"""Shares in proportion to speed: whole, fair, and without any effect on what a round expects."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.batch_shares import (
    BatchShares,
    StepTimes,
    apportioned,
    is_settlement,
    previous_settlement,
    told_for,
)

SPEEDS = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9)


def settled(batch: int, speeds: list[float]) -> BatchShares:
    plan = BatchShares(batch, len(speeds))
    plan.settle(dict(enumerate(speeds)), range(len(speeds)))
    return plan


@given(batch=st.integers(1, 300), speeds=SPEEDS, dead=st.sets(st.integers(1, 8)))
def test_shares_fill_the_round_of_the_living(
    batch: int, speeds: list[float], dead: set[int]
) -> None:
    """They add up to a batch for each member, and nobody has too few for batch normalisation."""
    members = set(range(len(speeds))) - dead
    shares = settled(batch, speeds).among(members)
    assert set(shares) == members
    assert sum(shares.values()) == batch * len(members)
    assert min(shares.values()) >= min(2, batch)


@given(total=st.integers(8, 500), speeds=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=4))
def test_a_faster_worker_never_has_less(total: int, speeds: list[float]) -> None:
    """Shares are in the order of the weights, and within one sample of their proportion."""
    shares = apportioned(total, dict(enumerate(speeds)), least=0)
    for rank, speed in enumerate(speeds):
        assert abs(shares[rank] - total * speed / sum(speeds)) < 1
        assert all(shares[rank] <= shares[o] for o, s in enumerate(speeds) if s > speed)


@settings(max_examples=20)
@given(batch=st.integers(1, 12), speeds=SPEEDS, dead=st.sets(st.integers(1, 8)))
def test_the_weighted_mean_is_that_of_all_samples(
    batch: int, speeds: list[float], dead: set[int]
) -> None:
    """Whatever the shares are, the mean over workers of their weighted mean gradients is the mean
    over the samples of the round; also of the survivors' when a member has died in it."""
    workers = range(len(speeds))
    plan = settled(batch, speeds)
    shares = plan.among(workers)
    living = [rank for rank in workers if rank not in dead]
    generator = torch.Generator().manual_seed(batch)
    samples = {
        rank: torch.randn(shares[rank], 3, generator=generator, dtype=torch.float64)
        for rank in living
    }
    means = [plan.weight(rank, shares, living) * samples[rank].mean(0) for rank in living]
    whole = torch.cat(list(samples.values())).mean(0)
    torch.testing.assert_close(torch.stack(means).mean(0), whole)


@given(
    slowness=st.lists(st.floats(1.0, 10.0), min_size=2, max_size=6),
    fixed=st.floats(0.0, 0.3),
)
def test_settlements_make_the_times_of_a_round_equal(slowness: list[float], fixed: float) -> None:
    """From times at the present shares alone, up to what is not worth a change and the rounding."""
    batch = 500
    plan = BatchShares(batch, len(slowness))

    def seconds() -> dict[int, float]:
        shares = plan.among(range(len(slowness)))
        return {r: slowness[r] * (fixed * batch + (1 - fixed) * b) for r, b in shares.items()}

    for _ in range(12):
        shares = plan.among(range(len(slowness)))
        plan.settle({r: shares[r] / t for r, t in seconds().items()}, range(len(slowness)))
    if min(plan.among(range(len(slowness))).values()) > 50:
        times = seconds().values()
        assert max(times) <= 1.06 * sum(times) / len(times)


def test_noise_changes_no_shares() -> None:
    """What would shorten a round by less than a twentieth is left alone."""
    plan = settled(32, [100.0, 104.0, 97.0, 101.0])
    assert plan.among(range(4)) == dict.fromkeys(range(4), 32)


def test_a_worker_whose_speed_is_unknown_keeps_its_share() -> None:
    """The others are shared out among themselves."""
    plan = BatchShares(30, 3)
    plan.settle({0: 10.0, 1: 30.0}, range(3))
    shares = plan.among(range(3))
    assert shares == {0: 15, 1: 45, 2: 30}


def test_speeds_are_told_before_each_settlement_and_of_no_step_twice() -> None:
    """The times between two settlements count for the second; the last rounds before it do not."""
    due = [step for step in range(200) if is_settlement(step)]
    assert due == [5, 10, 20, 40, 80, 120, 160]
    assert [told_for(step - 2) for step in due] == due
    assert [previous_settlement(step) for step in due] == [0, *due[:-1]]
    times = StepTimes()
    for step in range(20):
        times.add(step, samples=10, seconds=1.0 if step < 5 else 2.0)
        if step + 1 in (3, 8):
            assert times.speed(step + 3) == pytest.approx(10.0 if step < 5 else 5.0)
    assert times.speed(20) == pytest.approx(5.0)
