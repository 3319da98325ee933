"""Seeded storms: every method against random plans of faults.

A run may end in two ways: it finishes and has processed its samples, or one `PeerLost` names a
partition that outlasted the deadline. Everything else breaks heals or is survived, nothing crashes,
nobody hangs, and the same seed tells the same story twice.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.faults import FOREVER, Fault
from gossamer.errors import PeerLost
from gossamer.methods import METHODS, parse_method
from gossamer.sim.simulation import Simulation
from support import bowl, build, cluster_of, random_faults
from tiers import every, wide

STEPS = 10
SECONDS = 0.01
HORIZON = STEPS * SECONDS
DEADLINE = 0.02
BATCH = 1

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


def storm(seed: int, *, kills: int, heals: bool = True) -> Cluster:
    """A small cluster on which messages take about as long as it takes to notice a death."""
    workers = 6 if seed % 3 else 5
    faults = random_faults(seed, workers, HORIZON, kills=kills)
    if not heals:
        faults = [replace(f, lasts=FOREVER) if f.kind == "partition" else f for f in faults]
    return Cluster(
        workers=workers,
        compute=Compute(seconds=SECONDS, jitter=0.2),
        network=Wires(bandwidth=1e8, latency=2e-4, retransmission=0.01),
        failure_detection=0.005,
        # Without any patience nobody waits yet when the other side begins to count as lost.
        deadline=DEADLINE if heals else DEADLINE * (seed % 2),
        faults=tuple(faults),
    )


def digest_of_run(method: str, seed: int, cluster: Cluster) -> str:
    """The digest of a run that ended as it may; any other end is an error."""
    simulation = build(
        bowl(4), method, cluster, steps=STEPS, batch=BATCH, seed=seed, engine="none",
        model_bytes=100_000, optimiser="sgd",
    )  # fmt: skip
    try:
        result = simulation.run()
    except PeerLost as error:
        if not is_named_partition(error, cluster):
            raise
        return simulation.world.kernel.digest.hexdigest()
    check_end(simulation)
    return result.digest


def is_named_partition(error: PeerLost, cluster: Cluster) -> bool:
    """Whether the plan cuts off the peer of the error from somebody for too long."""
    if "unreachable" not in str(error):
        return False
    others = set(range(cluster.workers)) - {error.peer}
    return any(longest_cut(cluster, {error.peer, other}) > cluster.deadline for other in others)


def longest_cut(cluster: Cluster, pair: set[int]) -> float:
    """Partitions that follow on each other before the first has healed are one to those they part;
    whether a pair is on two sides is what counts."""
    cuts = sorted(
        (fault.at, fault.at + fault.lasts)
        for fault in cluster.faults
        if fault.kind == "partition"
        and pair <= frozenset().union(*fault.sides)
        and not any(pair <= side for side in fault.sides)
    )
    longest, since, until = 0.0, 0.0, 0.0
    for start, end in cuts:
        if start > until:
            since = start
        until = max(until, end)
        longest = max(longest, until - since)
    return longest


def check_end(simulation: Simulation) -> None:
    """Everybody who is alive has ended, and the samples were processed."""
    world = simulation.world
    dead = {fault.worker for fault in world.cluster.faults if fault.kind == "kill"}
    assert world.over
    assert set(range(world.size)) - world.alive <= dead
    if world.alive.isdisjoint(world.speakers):
        return  # nobody is left, or only groups without their leaders
    # To the sample, in whole rounds of who is alive and whole steps of groups.
    more = world.budget.processed - world.budget.samples
    is_in_step = world.budget.is_synchronous or len(world.speakers) < world.size
    together = world.size if is_in_step else 1
    assert 0 <= more < BATCH * together


def check(
    method: str, seed: int, *, kills: int = 1, twice: bool = True, heals: bool = True
) -> None:
    """One method in one storm; this is what a failure asks you to run."""
    cluster = storm(seed, kills=kills, heals=heals)
    call = f"test_swarm.check('{method}', {seed}, kills={kills}, heals={heals})"
    try:
        first = digest_of_run(method, seed, cluster)
        if twice:
            assert first == digest_of_run(method, seed, cluster), "the second run differs"
    except Exception as error:
        plan = ", ".join(map(str, cluster.faults)) or "no faults"
        raise AssertionError(
            f"{method} with seed {seed} against {plan}:\n{type(error).__name__}: {error}\n"
            f'to see it again: cd tests/sim && PYTHONPATH=.. python -c "import test_swarm; {call}"'
        ) from error


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("first", "last"),
    [
        (0, 10),
        pytest.param(10, 100, marks=wide),
        pytest.param(100, 200, marks=pytest.mark.slow),
    ],
)
def test_a_method_weathers_200_storms(name: str, first: int, last: int) -> None:
    """The law of this file; every fourth storm is run twice."""
    assert METHODS[name].promises.survives_death
    for seed in range(first, last):
        check(name, seed, twice=seed % 4 == 0)


@pytest.mark.parametrize("method", every(3, VARIANTS))
def test_its_options_weather_storms_too(method: str) -> None:
    """The same for texts that take other turns, and for groups."""
    for seed in seeds_for(method, range(12)):
        check(method, seed)


@pytest.mark.parametrize("method", every(3, [*METHODS, *VARIANTS]))
def test_a_partition_that_does_not_heal_stalls_nobody(method: str) -> None:
    """After the deadline the other side counts as lost, also for who begins to wait later and when
    somebody has died meanwhile: the run finishes or names it."""
    for seed in seeds_for(method, range(*((20, 30) if method in METHODS else (20, 26)))):
        check(method, seed, kills=2, twice=False, heals=False)


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


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, *VARIANTS])
def test_thousands_of_storms_with_two_deaths(method: str) -> None:
    """The same law with up to two deaths and many more seeds."""
    for seed in seeds_for(method, range(1000, 3000)):
        check(method, seed, kills=2, twice=seed % 10 == 0)


def seeds_for(method: str, seeds: range) -> list[int]:
    """Groups must divide the workers, which not every storm has."""
    groups = parse_method(method).groups
    return [s for s in seeds if not groups or storm(s, kills=0).workers % int(groups) == 0]
