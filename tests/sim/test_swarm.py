"""Seeded storms: every method against random plans of faults.

A run may end in two ways: it finishes and has processed its samples, or one `PeerLost` names a
partition that outlasted the deadline. Everything else breaks heals or is survived, nothing crashes,
nobody hangs, and the same seed tells the same story twice.
"""

from __future__ import annotations

import pytest

from gossamer.config.faults import Fault
from gossamer.contract.storms import storm, weather
from gossamer.methods import METHODS, parse_method
from support import bowl, build, cluster_of
from tiers import every, wide

VARIANTS = (
    "all_reduce:stale=1",
    "all_reduce:overlap=false",
    "d_psgd:adapt=before,topology=exponential",
    "d_psgd:topology=matchings",
    "ad_psgd:least=0,most=inf",
    "ad_psgd:topology=ring",
    "push_sum:overlap=2,topology=ring",
    "easgd:synchronous=true",
    "downpour:n_push=2,n_fetch=3",
    "local_sgd:period=4,state=averaged",
    "slowmo:period=3",
    "downpour:groups=3",
    "ad_psgd:groups=3",
    "d_psgd:groups=2",
    "local_sgd:groups=3",
)
"""Options under which a method's text takes other turns."""


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("first", "last"),
    [
        (0, 5),
        pytest.param(5, 100, marks=wide),
        pytest.param(100, 200, marks=pytest.mark.slow),
    ],
)
def test_a_method_weathers_200_storms(name: str, first: int, last: int) -> None:
    """The law of this file; every fourth storm is run twice."""
    assert METHODS[name].promises.survives_death
    for seed in range(first, last):
        weather(name, seed, twice=seed % 4 == 0)


@pytest.mark.parametrize("method", every(3, VARIANTS))
def test_its_options_weather_storms_too(method: str) -> None:
    """The same for texts that take other turns, and for groups."""
    for seed in seeds_for(method, range(12)):
        weather(method, seed)


@pytest.mark.parametrize("method", every(3, [*METHODS, *VARIANTS]))
def test_a_partition_that_does_not_heal_stalls_nobody(method: str) -> None:
    """After the deadline the other side counts as lost, also for who begins to wait later and when
    somebody has died meanwhile: the run finishes or names it."""
    for seed in seeds_for(method, range(20, 25)):
        weather(method, seed, kills=2, twice=False, heals=False)


@pytest.mark.parametrize("stale", [0, 1, 2])
def test_who_makes_up_for_a_dead_worker_applies_every_gradient_once(stale: int) -> None:
    """Its last gradients had been applied when it came to the end for the first time."""
    faults = (Fault("slow", amount=2.0, worker=3), Fault("kill", at=0.09, worker=3))
    cluster = cluster_of(4, faults=faults)
    simulation = build(bowl(), f"all_reduce:stale={stale}", cluster, steps=5, engine="loop")
    simulation.run()
    world = simulation.world
    steps = [world.metrics.workers[rank].steps for rank in sorted(world.alive)]
    assert len(set(steps)) == 1
    assert [world.replicas[rank].version for rank in sorted(world.alive)] == steps


@pytest.mark.parametrize(
    "seeds",
    [
        range(40),
        pytest.param(range(40, 1000), marks=wide),
        *(
            pytest.param(range(at, at + 1000), marks=pytest.mark.slow)
            for at in range(1000, 10_000, 1000)
        ),
    ],
)
def test_workers_that_come_and_go_weather_storms(seeds: range) -> None:
    """Deaths, returns, arrivals and random failures. The seed draws the method, too."""
    methods = [m for m in (*METHODS, *VARIANTS) if not parse_method(m).groups]
    for seed in seeds:
        weather(methods[seed % len(methods)], seed, kills=2, twice=seed % 4 == 0, comes=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, *VARIANTS])
def test_thousands_of_storms_with_two_deaths(method: str) -> None:
    """The same law with up to two deaths and many more seeds."""
    for seed in seeds_for(method, range(1000, 3000)):
        weather(method, seed, kills=2, twice=seed % 10 == 0)


def seeds_for(method: str, seeds: range) -> list[int]:
    """Groups must divide the workers, which not every storm has."""
    groups = parse_method(method).groups
    return [s for s in seeds if not groups or storm(s, kills=0).workers % int(groups) == 0]
