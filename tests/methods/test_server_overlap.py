"""Servers whose transfers run beside computing: what that hides, what it costs in staleness, and
that what the methods promise otherwise still holds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from gossamer.config.cluster import Wires
from gossamer.config.faults import Fault
from gossamer.errors import ConfigurationError
from gossamer.methods import parse_method
from gossamer.plan.cost.agreement import compare_step, equal_cluster
from gossamer.runs.result import Result
from gossamer.tasks import make_task
from support import Ones, bowl, build, centre, cluster_of, digits
from tiers import only

OVERLAPPING = ("downpour", "softsync", "staleness_aware", "dc_asgd", "bounded_delay", "ssp")
MODEL_BYTES = 1_000_000


def on_a_slow_link(method: str, seconds: float) -> Result:
    """Two workers; a model takes so many of the 10 ms of a gradient to cross a card."""
    cluster = cluster_of(2, distribution="constant", latency=1e-5)
    wires = Wires(bandwidth=2 * MODEL_BYTES / seconds, latency=1e-5)
    simulation = build(
        bowl(64), method, dataclasses.replace(cluster, network=wires), steps=50, engine="none",
        model_bytes=MODEL_BYTES,
    )  # fmt: skip
    return simulation.run()


@pytest.mark.parametrize("method", OVERLAPPING)
def test_what_a_step_has_time_for_is_hidden(method: str) -> None:
    """A way of 4 ms to the server and one back cost most of a second step without overlap, and
    next to nothing beside a gradient of 10 ms: only the first parameters and the last answer."""
    bound = ":bound=1," if method == "ssp" else ":"
    plain = on_a_slow_link(f"{method}{bound}overlap=false", 4e-3)
    hidden = on_a_slow_link(f"{method}{bound}overlap=true", 4e-3)
    assert plain.waiting_fraction > 0.2
    assert hidden.waiting_fraction < 0.04


@pytest.mark.parametrize("method", ["downpour", "softsync", "dc_asgd"])
def test_a_gradient_is_older_by_a_step_of_everybody(method: str) -> None:
    """Its mean staleness goes from p - 1 to 2 p - 1, and softsync counts in updates of p each."""

    def staleness(overlap: str) -> float:
        spec = f"{method}:overlap={overlap}"
        return build(bowl(), spec, cluster_of(4), steps=200, engine="none").run().mean_staleness

    added = staleness("true") - staleness("false")
    assert added == pytest.approx(1 if method == "softsync" else 4, rel=0.05)


@pytest.mark.parametrize("method", ["ssp:bound=2", "bounded_delay:bound=2", "ssp:bound=1"])
def test_the_bound_holds_with_overlap(method: str) -> None:
    """No clock is computed that is more than the bound ahead of the slowest, one worker being
    ten times slower."""
    cluster = cluster_of(4, faults=[Fault("slow", worker=1, amount=10)])
    spec = f"{method},overlap=true"
    result = build(bowl(), spec, cluster, steps=30, engine="none").run()
    bound = int(method[-1])
    assert result.max_clock_gap is not None
    assert 0 < result.max_clock_gap <= bound


@pytest.mark.parametrize("method", ["downpour", "softsync", "ssp"])
def test_no_gradient_is_lost_or_counted_twice(method: str) -> None:
    """The server ends at its start less the sum of all gradients, all of which are one."""
    simulation = build(
        bowl(4), f"{method}:overlap=true", cluster_of(1), steps=12, own_engine=Ones(),
        engine="none", learning_rate=0.1, optimiser="sgd",
    )  # fmt: skip
    before: Tensor = centre(simulation).clone()
    simulation.run()
    torch.testing.assert_close(
        before - centre(simulation), torch.full((4,), 1.2).double(), rtol=1e-5, atol=0.0
    )


def test_dc_asgd_compensates_from_the_value_that_the_gradient_was_computed_at() -> None:
    """With overlap that is the value before the last that the worker was given. Alone on a line,
    gradients of one: x <- x - eta (1 + lambda (x - x_at)), x_at two updates older."""
    rate, strength, steps = 0.1, 0.5, 10
    simulation = build(
        bowl(4), f"dc_asgd:overlap=true,compensation={strength}", cluster_of(1), steps=steps,
        own_engine=Ones(), engine="none", learning_rate=rate, optimiser="sgd",
    )  # fmt: skip
    start = centre(simulation).clone()
    simulation.run()
    path = [start]
    for step in range(steps):
        at = path[max(0, step - 1)]
        path.append(path[-1] - rate * (1 + strength * (path[-1] - at)))
    torch.testing.assert_close(centre(simulation), path[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "workers", "bandwidth"),
    only(
        [("downpour:overlap=true", 2, 3e8)],
        [
            (method, workers, bandwidth)
            for method in ("downpour:overlap=true", "softsync:overlap=true",
                           "downpour:overlap=true,n_push=4,n_fetch=4")
            for workers in (2, 8)
            for bandwidth in (12.5e9, 3e8, 12.5e6)
        ],
    ),
)  # fmt: skip
def test_the_price_of_an_overlapped_step_is_the_simulated_one(
    method: str, workers: int, bandwidth: float
) -> None:
    """Within a thousandth, for equal workers and constant compute times."""
    task = make_task("digits-logistic")
    found = compare_step(method, equal_cluster(workers, bandwidth), task, steps=40)
    assert abs(found.error) < 1e-3, found


@pytest.mark.parametrize("method", only(["downpour"], ["downpour", "dc_asgd", "bounded_delay"]))
def test_it_trains_with_overlap(method: str) -> None:
    """93 % of the test digits, with one step more of staleness."""
    spec = f"{method}:overlap=true"
    result = build(digits(), spec, cluster_of(4), steps=225, batch=16, evaluations=1).run()
    assert result.accuracy > 0.93


def test_an_overlap_without_a_bound_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nothing that it could overlap"):
        parse_method("ssp:bound=0,overlap=true").resolve(4, 100)
