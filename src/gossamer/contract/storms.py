"""Seeded storms: a method against random plans of faults.

A run may end in two ways: it finishes and has processed its samples, or one `PeerLost` names a
partition that outlasted the deadline. Everything else breaks heals or is survived, nothing crashes,
nobody hangs, and the same seed tells the same story twice. Every sample that was read was trained,
lost with a death or given back; where nobody dies or comes, a mean that is promised to be kept is;
and a server's standby has applied every gradient once, but for those within the stated bound.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.faults import FOREVER, KINDS, Failures, Fault
from gossamer.contract.small_worlds import bowl, build, scatter, total
from gossamer.errors import Error, PeerLost
from gossamer.methods import MethodSpec, parse_method
from gossamer.sim.simulation import Simulation

STEPS = 10
SECONDS = 0.01
HORIZON = STEPS * SECONDS
DEADLINE = 0.02
BATCH = 1
_APART = ("kill", "return", "arrive", "kill-server")
"""Kinds that random faults do not draw with the others."""


class BrokenPromise(Error):
    """A method does not keep what its row says; the message says how that was seen."""


def require(is_kept: bool, sentence: str) -> None:
    """Break the promise with this sentence unless it is kept."""
    if not is_kept:
        raise BrokenPromise(sentence)


def storm(seed: int, *, kills: int, heals: bool = True, comes: bool = False) -> Cluster:
    """A small cluster on which messages take about as long as it takes to notice a death."""
    workers = 6 if seed % 3 else 5
    faults = random_faults(seed, workers, HORIZON, kills=kills)
    if not heals:
        faults = [replace(f, lasts=FOREVER) if f.kind == "partition" else f for f in faults]
    if comes:
        faults += random_newcomers(seed, workers, HORIZON, faults)
    has_failures = comes and seed % 4 == 0
    return Cluster(
        workers=workers,
        compute=Compute(seconds=SECONDS, jitter=0.2),
        network=Wires(bandwidth=1e8, latency=2e-4, retransmission=0.01),
        failure_detection=0.005,
        # Without any patience nobody waits yet when the other side begins to count as lost.
        deadline=DEADLINE if heals else DEADLINE * (seed % 2),
        failures=Failures(2 * HORIZON, 0.1 * HORIZON) if has_failures else Failures(),
        faults=tuple(faults),
    )


def random_newcomers(
    seed: int, workers: int, horizon_s: float, faults: Sequence[Fault]
) -> list[Fault]:
    """Most of the dead come back, some to die again; some workers arrive late, but not all."""
    rng = random.Random(f"{seed}/newcomers")
    killed = [fault for fault in faults if fault.kind == "kill"]
    plan: list[Fault] = []
    for death in killed:
        at = death.at + rng.uniform(0.0, 0.5) * horizon_s
        if rng.random() < 0.75:
            plan.append(Fault("return", at, worker=death.worker))
            if rng.random() < 0.4:
                again = at + rng.uniform(0.0, 0.4) * horizon_s
                plan.append(Fault("kill", again, worker=death.worker))
                plan.append(Fault("return", again + 0.1 * horizon_s, worker=death.worker))
    others = sorted(set(range(workers)) - {fault.worker for fault in killed})
    for worker in rng.sample(others, rng.randint(0, min(2, len(others) - 1))):
        plan.append(Fault("arrive", rng.uniform(0.0, horizon_s), worker=worker))
    return plan


def random_faults(seed: int, workers: int, horizon_s: float, *, kills: int = 1) -> list[Fault]:
    """Faults drawn from a seed. All but deaths heal before three quarters of the horizon."""
    rng = random.Random(f"{seed}/faults")
    plan: list[Fault] = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice([kind for kind in KINDS if kind not in _APART])
        at = rng.uniform(0.0, 0.5 * horizon_s)
        lasts = rng.uniform(0.02, 0.25) * horizon_s
        worker = rng.randrange(workers)
        if kind in ("slow", "slow-link"):
            plan.append(Fault(kind, at, lasts, worker, amount=rng.choice([2.0, 10.0, 100.0])))
        elif kind == "drop":
            plan.append(Fault(kind, at, lasts, amount=rng.uniform(0.01, 0.3)))
        elif kind == "delay":
            plan.append(Fault(kind, at, lasts, amount=rng.uniform(0.0, 0.05) * horizon_s))
        elif kind == "pause":
            plan.append(Fault(kind, at, lasts, worker))
        elif workers > 1:
            ranks = list(range(workers))
            rng.shuffle(ranks)
            cut = rng.randint(1, workers - 1)
            plan.append(
                Fault(kind, at, lasts, sides=(frozenset(ranks[:cut]), frozenset(ranks[cut:])))
            )
    for worker in rng.sample(range(workers), rng.randint(0, min(kills, workers - 2))):
        plan.append(Fault("kill", rng.uniform(0.0, horizon_s), worker=worker))
    return plan


def with_mortal_servers(
    spec: MethodSpec, seed: int, cluster: Cluster
) -> tuple[MethodSpec, Cluster]:
    """In two of three storms servers have standbys, and one of the servers dies."""
    rng = random.Random(f"{seed}/servers")
    if not spec.method.has_server or spec.shape.machines > 1 or rng.random() < 1 / 3:
        return spec, cluster
    fault = Fault("kill-server", rng.uniform(0.0, HORIZON), worker=rng.randrange(spec.servers))
    is_in_step = spec.method.is_synchronous(spec.resolve(cluster.workers, STEPS))
    standby = "sync" if is_in_step else rng.choice(["sync", "1", "4"])
    return replace(spec, standby=standby), replace(cluster, faults=(*cluster.faults, fault))


def weather(
    method: str | MethodSpec,
    seed: int,
    *,
    kills: int = 1,
    twice: bool = True,
    heals: bool = True,
    comes: bool = False,
) -> None:
    """One method in one storm, and where that is wanted a second time. Where workers may come,
    servers may die."""
    spec, cluster = parse_method(method), storm(seed, kills=kills, heals=heals, comes=comes)
    if comes:
        spec, cluster = with_mortal_servers(spec, seed, cluster)
    try:
        first = _digest_of_run(spec, seed, cluster)
        if twice and first != _digest_of_run(spec, seed, cluster):
            raise BrokenPromise("the second run differs from the first")
    except Exception as error:
        plan = ", ".join(map(str, cluster.faults)) or "no faults"
        raise BrokenPromise(
            f"{spec} with seed {seed} against {plan}: {type(error).__name__}: {error} (to see it "
            f"again: gossamer.contract.storms.weather({str(method)!r}, {seed}, kills={kills}, "
            f"heals={heals}, comes={comes}))"
        ) from error


def _digest_of_run(method: MethodSpec, seed: int, cluster: Cluster) -> str:
    """The digest of a run that ended as it may; any other end is an error."""
    simulation = build(
        bowl(4), method, cluster, steps=STEPS, batch=BATCH, seed=seed, engine="none",
        model_bytes=100_000, optimiser="sgd",
    )  # fmt: skip
    is_kept = method.method.promises.keeps_mean and not method.groups
    if is_kept:
        scatter(simulation, seed)
    before = total(simulation)
    try:
        result = simulation.run()
    except PeerLost as error:
        if not _is_named_partition(error, cluster):
            raise
        return simulation.world.kernel.digest.hexdigest()
    _check_end(simulation)
    pairs = combinations(range(cluster.workers), 2)
    is_whole = all(longest_cut(cluster, set(pair)) <= cluster.deadline for pair in pairs)
    if is_kept and is_whole and not cluster.is_mortal and not cluster.has_newcomers:
        change = float(((total(simulation) - before) / before).abs().max())
        require(change < 1e-5, f"the mean was to be kept and moved by {100 * change:.2g} %")
    return result.digest


def _is_named_partition(error: PeerLost, cluster: Cluster) -> bool:
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
        and pair <= frozenset[int]().union(*fault.sides)
        and not any(pair <= side for side in fault.sides)
    )
    longest, since, until = 0.0, 0.0, 0.0
    for start, end in cuts:
        if start > until:
            since = start
        until = max(until, end)
        longest = max(longest, until - since)
    return longest


def _check_end(simulation: Simulation) -> None:
    """Everybody who is alive has ended, and the samples were processed."""
    world = simulation.world
    mortal = {fault.worker for fault in world.cluster.faults if fault.kind in ("kill", "arrive")}
    if world.cluster.failures.are_there:
        mortal = set(range(world.size))
    if not world.over or not set(range(world.size)) - world.alive <= mortal:
        raise BrokenPromise("somebody who lives has not ended, or somebody died unasked")
    trained = world.budget.processed
    if world.samples_read != trained + world.samples_aborted:
        raise BrokenPromise(
            f"{world.samples_read} samples were read, but {trained} trained and "
            f"{world.samples_aborted} given back"
        )
    for row in world.book.rows():
        again = row["given_again"]
        require(
            row["read"] == row["trained"] + again and row["lost"] <= again,
            f"the samples of an epoch do not add up: {row}",
        )
    if world.alive.isdisjoint(world.speakers):
        return  # nobody is left, or only groups without their leaders
    # To the sample, in whole rounds of who is alive and whole steps of groups.
    more = world.budget.processed - world.budget.samples
    is_in_step = world.budget.is_synchronous or len(world.speakers) < world.size
    together = world.size if is_in_step else 1
    if not 0 <= more < BATCH * together:
        raise BrokenPromise(
            f"{world.budget.processed} samples were processed, asked for were "
            f"{world.budget.samples}"
        )
