"""Delay acts as momentum: how much, measured on a quadratic, and what to leave out for it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.optim.momentum import explicit_momentum, implicit_momentum, measured_momentum
from gossamer.sim.replica_matrix import SimulatedReplica
from gossamer.tasks import make_task
from support import before_each_descent, build, cluster_of
from tiers import every

DIMENSIONS = 4
CURVATURES = torch.logspace(0, 1, DIMENSIONS, base=0.25, dtype=torch.float64)
WORKERS_AND_RATES = [(2, 0.6), (4, 0.3), (8, 0.15)]


@given(st.floats(0, 0.999), st.integers(1, 64))
def test_explicit_and_implicit_momentum_make_up_the_target(target, workers):
    """1 - total = (1 - explicit) (1 - implicit), unless asynchrony alone is too much already."""
    explicit = explicit_momentum(target, workers)
    total = 1 - (1 - explicit) * (1 - implicit_momentum(workers))
    assert 0 <= explicit <= target + 1e-12
    if implicit_momentum(workers) < target:
        assert total == pytest.approx(target, abs=1e-12)
    else:
        assert explicit == pytest.approx(0, abs=1e-12)


def test_one_worker_is_not_asynchronous():
    """A single worker adds nothing and keeps its momentum."""
    assert implicit_momentum(1) == 0
    assert explicit_momentum(0.9, 1) == pytest.approx(0.9)


@settings(max_examples=30)
@given(st.floats(0, 0.95), st.floats(0.05, 0.5), st.integers(10, 40))
def test_the_fit_finds_the_momentum_of_a_heavy_ball(momentum, rate, length):
    """Without any asynchrony, momentum and rate come back as they were set."""
    x = previous = torch.ones(DIMENSIONS, dtype=torch.float64)
    points = [x]
    for _ in range(length):
        x, previous = x + momentum * (x - previous) - rate * CURVATURES * x, x
        points.append(x)
    trajectory = torch.stack(points)
    fitted = measured_momentum(trajectory, CURVATURES * trajectory)
    assert fitted.momentum == pytest.approx(momentum, abs=1e-6)
    assert fitted.learning_rate == pytest.approx(rate, abs=1e-6)


def mean_trajectory(
    workers: int, rate: float, *, seeds: int, length: int, momentum: float = 0.0
) -> Tensor:
    """The server's parameters after each gradient, all ones at first: the mean over many runs."""
    task = make_task(f"quadratic:dimension={DIMENSIONS},condition=4,noise=0,spread=0,samples=64")
    method = f"downpour:server_optimiser=(sgd:momentum={momentum})"
    cluster = cluster_of(workers, distribution="exponential", latency=0.0)
    total = torch.zeros(length, DIMENSIONS, dtype=torch.float64)
    for seed in range(seeds):
        simulation = build(
            task, method, cluster, steps=-(-length // workers), batch=1, seed=seed,
            engine="loop", learning_rate=rate, evaluations=1,
        )  # fmt: skip
        server = simulation.world.replicas[workers]
        server.assign_(torch.ones(DIMENSIONS))
        points: list[Tensor] = []

        def note(replica: SimulatedReplica, _read, server=server, points=points) -> None:
            if replica is server:
                points.append(replica.snapshot())

        before_each_descent(simulation, note)
        simulation.run()
        total += torch.stack(points[:length])
    return total / seeds


def fitted_total(trajectory: Tensor) -> float:
    return measured_momentum(trajectory, CURVATURES * trajectory).momentum


@pytest.mark.parametrize(("workers", "rate"), every(3, WORKERS_AND_RATES))
def test_asynchronous_workers_add_the_momentum_that_theory_says(workers, rate):
    """1 - 1/n in the mean over 80 runs, and an effective rate of eta/n. What is left of the runs'
    scatter pulls every such fit a little down, so it is held to 0.04."""
    trajectory = mean_trajectory(workers, rate, seeds=80, length=20)
    fitted = measured_momentum(trajectory, CURVATURES * trajectory)
    assert fitted.momentum == pytest.approx(implicit_momentum(workers), abs=0.04)
    assert fitted.learning_rate == pytest.approx(rate / workers, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "rate"), WORKERS_AND_RATES)
def test_with_more_runs_the_momentum_comes_closer_to_theory(workers, rate):
    """In the mean over 800 runs the fit is within 0.02."""
    trajectory = mean_trajectory(workers, rate, seeds=800, length=20)
    assert fitted_total(trajectory) == pytest.approx(implicit_momentum(workers), abs=0.02)


def test_lowered_momentum_keeps_the_total():
    """Eight workers with the momentum lowered for them have about the total that was wanted; with
    that momentum on top of asynchrony's own, the total leaves no room for convergence."""
    workers, target = 8, 0.9
    lowered = explicit_momentum(target, workers)
    assert lowered == pytest.approx(0.2)
    totals = [
        fitted_total(mean_trajectory(workers, 0.3 * (1 - m), seeds=25, length=40, momentum=m))
        for m in (lowered, target)
    ]
    assert totals[0] == pytest.approx(target, abs=0.06)
    assert totals[1] > 0.97


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: implicit_momentum(0), "workers must be at least 1, got 0"),
        (
            lambda: explicit_momentum(1.0, 4),
            "target momentum must be at least 0 and below 1, got 1.0",
        ),
        (
            lambda: measured_momentum(torch.ones(2, 3), torch.ones(2, 3)),
            "measured_momentum needs a trajectory of at least 3 points and a gradient at each, "
            "both [steps, dimensions], got [2, 3] and [2, 3]",
        ),
        (
            lambda: measured_momentum(torch.ones(5, 3), torch.ones(4, 3)),
            "measured_momentum needs a trajectory of at least 3 points and a gradient at each, "
            "both [steps, dimensions], got [5, 3] and [4, 3]",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(call, sentence):
    """One sentence with what was got and what was expected."""
    with pytest.raises(ConfigurationError) as failure:
        call()
    assert str(failure.value) == sentence
