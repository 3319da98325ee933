"""What a run in virtual time spends: sums over its events, and nothing without prices."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.config.cluster import Cluster
from gossamer.config.network import Sites
from gossamer.config.price import Price
from gossamer.config.settings import make_settings
from gossamer.contract.storms import random_faults
from gossamer.observe.observer import SECOND, Observer, Span
from gossamer.sim.simulation import Simulation
from support import bowl, build, cluster_of, digits
from tiers import only, wide

PRICE = Price(2.0, ((1, 5.0),), egress_per_gb=4e6, watts=300.0, idle_watts=70.0)
HALVES = Sites(names=("north", "south"), machines=(1, 1))


class Trace(Observer):
    """The computing of each worker and every message that arrived, as the events tell them."""

    def __init__(self) -> None:
        self.busy_ns: Counter[int] = Counter()
        self.messages: list[tuple[int, int, int]] = []

    def computed(
        self, worker: int, span: Span, work_ns: int, samples: int, loss: Tensor | None
    ) -> None:
        self.busy_ns[worker] += work_ns


def traced(method: str, cluster: Cluster, **choices: Any) -> tuple[dict[str, Any], Trace]:
    """A run, and what its events have told."""
    trace = Trace()
    epochs = 6 * 4 * cluster.workers / len(bowl().train)
    chosen = make_settings(bowl(), method, cluster, batch=4, epochs=epochs, **choices)
    run = Simulation(chosen, observers=[trace])
    carry = run.world.post.carry

    def carried(
        source: int, target: int, size_bytes: int, arrived: Callable[[], None], what: str = ""
    ) -> None:
        def noted() -> None:
            trace.messages.append((source, target, size_bytes))
            arrived()

        carry(source, target, size_bytes, noted, what)

    run.world.post.carry = carried
    return run.run().summary, trace


def check(found: dict[str, Any], trace: Trace, workers: int, egress: float) -> None:
    """Dollars and joules are those of a sum over the workers."""
    seconds = found["virtual_seconds"]
    hours = [5.0 if rank == 1 else 2.0 for rank in range(workers)]
    busy = [trace.busy_ns[rank] / SECOND for rank in range(workers)]
    dollars = sum(hour / 3600 * seconds for hour in hours) + egress / 1e9 * 4e6
    joules = sum(300.0 * one + 70.0 * (seconds - one) for one in busy)
    assert found["egress_bytes"] == egress
    assert found["dollars"] == pytest.approx(dollars, rel=1e-9)
    assert found["joules"] == pytest.approx(joules, rel=1e-9)
    assert all(0 <= one <= seconds + 1e-9 for one in busy)


@pytest.mark.parametrize(
    "method", only(("ad_psgd", "downpour"), ["ad_psgd", "downpour", "easgd", "d_psgd", "push_sum"])
)
@pytest.mark.parametrize("sites", [Sites(), HALVES], ids=["no sites", "sites"])
def test_spending_is_a_sum_over_the_events(method: str, sites: Sites) -> None:
    """Bytes count where they leave a site, and without sites where they leave a machine."""
    cluster = dataclasses.replace(cluster_of(4, latency=1e-3), price=PRICE, sites=sites)
    found, trace = traced(method, cluster)
    # Servers have machines of their own, at the first site.
    place = [0, 0, 1, 1, 0, 0] if sites.names else [0, 1, 2, 3, 4, 5]
    egress = sum(size for one, other, size in trace.messages if place[one] != place[other])
    assert egress > 0
    check(found, trace, 4, egress)


@wide
@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_spending_is_a_sum_whatever_breaks(seed: int) -> None:
    """A worker that is slow, paused or dead is paid for to the end."""
    storm = random_faults(seed, 4, 0.3)
    cluster = dataclasses.replace(cluster_of(4, faults=storm), price=PRICE)
    found, trace = traced("ad_psgd", cluster, seed=seed)
    check(found, trace, 4, sum(size for one, other, size in trace.messages if one != other))


def test_a_ring_across_two_sites_pays_for_its_two_crossings() -> None:
    """Two of the four members of a ring have their next at the other site, and all send alike."""
    cluster = dataclasses.replace(cluster_of(4), price=PRICE, sites=HALVES)
    found, trace = traced("all_reduce:overlap=false", cluster)
    assert not trace.messages
    check(found, trace, 4, sum(card["sent"] for card in found["cards"]) / 2)


def test_prices_change_nothing_else_and_clusters_without_them_tell_nothing() -> None:
    """The same digest, and the keys are those of spending."""
    plain, priced = (
        build(digits(), "ad_psgd", cluster, steps=3).run().summary
        for cluster in (cluster_of(3), dataclasses.replace(cluster_of(3), price=PRICE))
    )
    assert plain["digest"] == priced["digest"]
    assert priced.keys() - plain.keys() == {"dollars", "joules", "egress_bytes"}
    assert plain.keys() <= priced.keys()


@pytest.mark.parametrize(
    ("price", "told"),
    [
        (Price(worker_hour=1.0), {"dollars"}),
        (Price(egress_per_gb=1.0), {"dollars"}),
        (Price(idle_watts=1.0), {"joules"}),
        (Price(), set()),
    ],
)
def test_only_what_has_a_price_is_told(price: Price, told: set[str]) -> None:
    """No column of zeros that nobody has measured."""
    cluster = dataclasses.replace(cluster_of(2), price=price)
    found = build(bowl(), "all_reduce", cluster, steps=2).run().summary
    assert found.keys() & {"dollars", "joules"} == told
