"""Sites, racks, other traffic, collectives as flows, and what is shared besides the network."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from exact_network import LINK, exact
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.config.cluster import Cluster, Compute, Wires, cluster_from, load_cluster
from gossamer.config.collective_costs import COLLECTIVES
from gossamer.config.faults import Fault
from gossamer.config.network import Background, Phases, Sites
from gossamer.errors import Stalled
from gossamer.methods import METHODS
from gossamer.replica import Replica
from gossamer.runs.result import Result
from gossamer.sim.faults.simulated_faults import SharedSlowness
from gossamer.sim.kernel import SECOND
from gossamer.worker import Worker
from support import Role, bowl, build, only_here
from tiers import only, wide

RATE = float(LINK) * SECOND
"""Bytes per second of one unit of the exact reference."""
MEGABYTE = 1_000_000
STEP = 1e-3
"""Seconds of a gradient."""


def news(units: float) -> torch.Tensor:
    """What takes so many milliseconds at a rate of one unit."""
    return torch.zeros(round(units * RATE / 4000))


def timed(method: str, cluster: Cluster, steps: int = 6, **choices: Any) -> Result:
    return build(bowl(), method, cluster, steps=steps, engine="none", **choices).run()


def seconds_of(role: Role, cluster: Cluster) -> float:
    """How long a run of a method takes that exists in one test only."""
    run = build(bowl(), only_here(role), cluster, steps=1, engine="none").run()
    return run.virtual_seconds


def quiet(workers: int, *, compute: float = STEP, racks_of: int = 0, **wires: Any) -> Cluster:
    """Constant times; nothing is latent unless asked for."""
    return Cluster(
        workers=workers, machines_per_rack=racks_of,
        compute=Compute(seconds=compute, distribution="constant"),
        network=Wires(**{"bandwidth": 8 * RATE, "latency": 0.0} | wires),
    )  # fmt: skip


def at_sites(
    cluster: Cluster, bandwidth: float, latency: float, *, shared: bool = False
) -> Cluster:
    """The same in two halves."""
    pairs = (("north", "south"),) if shared else ()
    sites = Sites(
        names=("north", "south"), machines=(1, 1), bandwidth=((0.0, bandwidth), (bandwidth, 0.0)),
        latency=((cluster.network.latency, latency), (latency, cluster.network.latency)),
        shared=pairs,
    )  # fmt: skip
    return dataclasses.replace(cluster, sites=sites)


# ---------------------------------------------------------------------- worked examples


@pytest.mark.parametrize(("shared", "seconds"), [(False, 4e-3), (True, 8e-3)])
def test_an_entry_caps_one_flow_and_a_shared_one_holds_all(shared: bool, seconds: float) -> None:
    """Two messages of 4 units cross at a rate of 1: side by side, or through one pipe."""

    async def role(w: Worker, x: Replica) -> None:
        if w.rank < 2:
            await w.send(w.rank + 2, news(4), tag="news")
        else:
            await w.receive("news")
        await w.gradient(x)

    cluster = at_sites(quiet(4), RATE, 0.0, shared=shared)
    assert seconds_of(role, cluster) == pytest.approx(seconds + STEP, rel=1e-3)


def test_what_leaves_a_rack_shares_its_uplink_and_what_stays_does_not() -> None:
    """Four senders at 8 units each through an uplink of 8 take four times as long as one."""

    async def role(w: Worker, x: Replica) -> None:
        distance = 4 if crosses else 2
        if w.rank % 8 < distance and w.rank < 4:
            await w.send(w.rank + distance, news(8), tag="news")
        elif w.rank < 8 and w.rank - distance in range(min(4, distance)):
            await w.receive("news")
        await w.gradient(x)

    cluster = quiet(8, uplink=8 * RATE, racks_of=4)
    crosses = True
    assert seconds_of(role, cluster) == pytest.approx(4e-3 + STEP, rel=1e-3)
    crosses = False
    assert seconds_of(role, cluster) == pytest.approx(1e-3 + STEP, rel=1e-3)


@pytest.mark.parametrize(("senders", "seconds"), [(1, 4e-3), (4, 4e-3), (5, 5e-3)])
def test_up_and_down_are_the_two_directions_of_a_card(senders: int, seconds: float) -> None:
    """News of 4 go out at 1 and come in at 4: it takes 4 ms from one, and from four together."""

    async def role(w: Worker, x: Replica) -> None:
        if 0 < w.rank <= senders:
            await w.send(0, news(4), tag="news")
        for _ in range(senders if w.rank == 0 else 0):
            await w.receive("news")
        await w.gradient(x)

    cluster = quiet(6, up=RATE, down=4 * RATE)
    assert seconds_of(role, cluster) == pytest.approx(seconds + STEP, rel=1e-3)


def test_other_traffic_leaves_its_share_as_the_trace_says() -> None:
    """News of 8 at 8: half of them in 0.5 ms, the rest at a quarter; then all over again."""

    async def role(w: Worker, x: Replica) -> None:
        for _ in range(2):
            if w.rank == 0:
                await w.send(1, news(8), tag="news")
            else:
                await w.receive("news")
        await w.gradient(x)

    trace = ((0.0, 0.0), (0.5e-3, 0.75))
    once = dataclasses.replace(quiet(2), background=Background(trace=trace))
    again = dataclasses.replace(quiet(2), background=Background(trace=trace, repeat=2.5e-3))
    assert seconds_of(role, once) == pytest.approx(6.5e-3 + STEP, rel=1e-3)
    assert seconds_of(role, again) == pytest.approx(5e-3 + STEP, rel=1e-3)


@pytest.mark.parametrize(("message", "seconds"), [(80, 5e-3), (8, 3e-3)])
def test_communication_takes_its_share_of_computing(message: float, seconds: float) -> None:
    """A gradient of 2.5 ms at half speed while its card sends: all the time, or 1 ms of it."""

    async def role(w: Worker, x: Replica) -> None:
        gone = w.send(1, news(message), tag="news") if w.rank == 0 else None
        await w.gradient(x)
        if w.rank == 0:
            took.append(w.now())
        if gone is not None:
            await gone

    took: list[float] = []
    seconds_of(role, quiet(2, compute=2.5e-3, processor_share=0.5))
    assert took == [pytest.approx(seconds, rel=1e-3)]


def test_workers_of_a_group_are_slow_together() -> None:
    """The same factor at the same time; over a long time the share of slow phases, and the mean
    and the spread of the jitter, are those asked for."""
    phases = Phases("rack", every=3.0, lasts=1.0, factor=4.0, jitter=0.2, jitter_lasts=0.5)
    cluster = dataclasses.replace(quiet(4), machines_per_rack=2, phases=phases)
    run = build(bowl(), "ensemble", cluster, steps=1, engine="none")
    run.run()
    first, second, third, _ = (run.world.faults.slowness(rank) for rank in range(4))
    assert first == second != third

    plain = dataclasses.replace(phases, factor=1.0)
    found = SharedSlowness(plain, random.Random(1), random.Random(2))
    factors = torch.tensor([found.at(at / 2) for at in range(4000)])
    assert factors.mean() == pytest.approx(1.0, abs=0.02)
    assert factors.std() == pytest.approx(0.2, abs=0.02)
    slow = SharedSlowness(
        dataclasses.replace(phases, jitter=0.0), random.Random(1), random.Random()
    )
    shares = [slow.at(at / 10) == 4.0 for at in range(0, 40_000, 4)]
    assert sum(shares) / len(shares) == pytest.approx(0.25, abs=0.04)


def test_a_run_in_which_nobody_can_go_on_stalls_beside_other_traffic() -> None:
    """Bursts are on the clock only while something of ours is on its way."""

    async def role(w: Worker, x: Replica) -> None:
        await w.send((w.rank + 1) % 2, torch.zeros(MEGABYTE), tag="news")
        await w.receive("other news")

    bursts = Background(load=0.5, every=1e-3, lasts=1e-3)
    with pytest.raises(Stalled, match="waits for receive"):
        seconds_of(role, dataclasses.replace(quiet(2), background=bursts))


def test_bursts_take_their_share_of_a_long_transfer() -> None:
    """Half of a link, half of the time: a quarter of it, over 600 bursts."""

    async def role(w: Worker, x: Replica) -> None:
        if w.rank == 0:
            await w.send(1, news(80), tag="news")
        else:
            await w.receive("news")
        await w.gradient(x)

    # Only what worker 0 sends can be held up: everything else has more than it needs.
    bursts = Background(load=0.5, every=1e-5, lasts=1e-5)
    cluster = dataclasses.replace(quiet(2, up=8 * RATE, down=32 * RATE), background=bursts)
    assert seconds_of(role, cluster) - STEP == pytest.approx(1e-2 / 0.75, rel=0.05)


# ---------------------------------------------------------------------- collectives


KINDS = ("all_reduce", "all_gather", "broadcast")
CASES = [
    (kind, collective, workers)
    for kind in KINDS
    for collective in (COLLECTIVES if kind == "all_reduce" else ("ring",))
    for workers in (1, 2, 3, 4, 7, 8, 13)
]


@pytest.mark.parametrize(
    ("kind", "collective", "workers"), only([c for c in CASES if c[2] == 7], CASES)
)
def test_a_collective_alone_takes_as_long_as_its_formula(
    kind: str, collective: str, workers: int
) -> None:
    """As flows, to a nanosecond in each round, with one slow card and two to a machine, too."""

    async def role(w: Worker, x: Replica) -> None:
        value, everyone = torch.ones(MEGABYTE // 10), range(w.size)
        if kind == "broadcast":
            await w.broadcast(value if w.rank == 0 else None, root=0, over=everyone)
        else:
            await (w.all_reduce(value) if kind == "all_reduce" else w.all_gather(value))
        await w.gradient(x)

    for per_machine, faults in ((1, ()), (2, (Fault("slow-link", worker=0, amount=3.0),))):
        cluster = dataclasses.replace(
            quiet(workers, latency=1e-4, collective=collective, memory_bandwidth=1e10),
            workers_per_machine=per_machine, faults=faults,
        )  # fmt: skip
        wires = dataclasses.replace(cluster.network, collectives="flows")
        flows = dataclasses.replace(cluster, network=wires)
        if faults and collective in ("tree", "halving_doubling", "butterfly"):
            # The formula has the slow card in every round; a tree's flows only where it takes part.
            assert seconds_of(role, flows) <= seconds_of(role, cluster) + 1e-6
        else:
            assert seconds_of(role, flows) == pytest.approx(seconds_of(role, cluster), abs=3e-8)


@st.composite
def crossings(draw):
    """Rates of cards, an all-reduce, and messages beside it: source, target, start in us, size."""
    count = draw(st.integers(2, 5))
    rates = draw(st.lists(st.integers(1, 16), min_size=count, max_size=count))
    rank = st.integers(0, count - 1)
    message = st.tuples(rank, rank, st.integers(0, 400), st.integers(1000, 40_000))
    distinct = message.filter(lambda one: one[0] != one[1])
    pairs = st.lists(distinct, max_size=5, unique_by=lambda one: one[:2])
    return rates, draw(st.integers(500, 20_000)), draw(pairs)


@given(crossings())
@settings(max_examples=8)
def test_collectives_and_messages_share_cards_max_min_fairly(case) -> None:
    """Both end when exact progressive filling over the ring's flows and the messages says."""
    rates, floats, messages = case
    ended: dict[object, int] = {}

    async def role(w: Worker, x: Replica) -> None:
        async def news(number: int, target: int, start: int, size: int) -> None:
            await w.sleep(start * 1e-6)
            await w.send(target, torch.zeros(size, dtype=torch.uint8), tag=number)
            ended[number] = round(w.now() * SECOND)

        own = [(n, *m[1:]) for n, m in enumerate(messages) if m[0] == w.rank]
        sides = [w.start(news(*one)) for one in own]
        await w.all_reduce(torch.zeros(floats))
        ended["ring", w.rank] = round(w.now() * SECOND)
        for side in sides:
            await side
        await w.gradient(x)

    count = len(rates)
    faults = tuple(
        Fault("slow-link", worker=rank, amount=16 / rate) for rank, rate in enumerate(rates)
    )
    cluster = dataclasses.replace(
        quiet(count, bandwidth=16 * RATE, collectives="flows"), faults=faults
    )
    run = build(bowl(), only_here(role), cluster, steps=1, engine="none")
    sizes = [run.world.post.wire_size(torch.zeros(m[3], dtype=torch.uint8)) for m in messages]
    whole = run.world.post.wire_size(torch.zeros(floats))
    run.run()
    share = round(2 * (count - 1) / count * whole)
    flows = [(0, rank, (rank + 1) % count, share, None) for rank in range(count)]
    flows += [
        (m[2] * 1000, m[0], m[1], size, None) for m, size in zip(messages, sizes, strict=True)
    ]
    expected, _ = exact(([(r, r) for r in rates], flows, [], [], [([], None)] * len(flows)))
    got = [ended["ring", rank] for rank in range(count)]
    assert max(abs(one - max(expected[:count])) for one in got) <= 2
    for number, end in enumerate(expected[count:]):
        assert abs(ended[number] - end) <= 2


def test_a_death_inside_a_flowing_collective_starts_it_again_over_the_survivors() -> None:
    """As where it is a formula: the mean is that of the living, and the cards are free again."""

    async def role(w: Worker, x: Replica) -> None:
        means.append((await w.all_reduce(torch.full((MEGABYTE,), float(w.rank))))[0].item())
        await w.gradient(x)

    means: list[float] = []
    cluster = quiet(4, bandwidth=1e9, collectives="flows")
    cluster = dataclasses.replace(cluster, failure_detection=1e-3)
    cluster = cluster.changed(faults=[Fault("kill", at=1e-3, worker=3)])
    seconds_of(role, cluster)
    assert means == [1.0, 1.0, 1.0]


# ---------------------------------------------------------------------- laws


OTHERS = (
    Background(), Background(trace=((0.01, 0.5), (0.05, 0.1)), repeat=0.2),
    Background(load=0.6, every=0.02, lasts=0.01),
)  # fmt: skip
SLOWNESS = (
    Phases(), Phases("machine", every=0.05, lasts=0.02, factor=3.0, jitter=0.1, jitter_lasts=0.03)
)  # fmt: skip


def described(draw: Any) -> Cluster:
    """A cluster with sites, racks, uplinks, asymmetric cards, other traffic and slow phases, of any
    speeds."""
    rate = st.floats(1e6, 1e9)
    workers = draw(st.sampled_from([4, 6, 8]))
    racks = draw(st.sampled_from([0, 2, 3]))
    cluster = Cluster(
        workers=workers, machines_per_rack=racks,
        compute=Compute(
            seconds=draw(st.floats(1e-3, 1e-1)), per_sample=draw(st.sampled_from([0.0, 1e-3])),
            jitter=0.1, unoverlapped_seconds=1e-3,
        ),
        background=draw(st.sampled_from(OTHERS)), phases=draw(st.sampled_from(SLOWNESS)),
        network=Wires(
            bandwidth=draw(rate), up=draw(st.just(0.0) | rate), down=draw(st.just(0.0) | rate),
            latency=draw(st.floats(1e-5, 1e-2)), uplink=draw(rate) if racks else 0.0,
            rack_latency=1e-4, processor_share=draw(st.sampled_from([0.0, 0.2])),
        ),
    )  # fmt: skip
    if draw(st.booleans()):
        cluster = at_sites(cluster, draw(rate), 1e-3, shared=draw(st.booleans()))
    return cluster


CLUSTERS = st.composite(described)()


def times_as_fast(cluster: Cluster, k: float) -> Cluster:
    """Bandwidths times k; latencies, fixed costs, compute and every other time over k."""
    faster, compute, sites = cluster.with_bandwidth_times(k), cluster.compute, cluster.sites
    wires, others, phases = faster.network, cluster.background, cluster.phases
    return dataclasses.replace(
        faster,
        compute=dataclasses.replace(
            compute, seconds=compute.seconds / k, per_sample=compute.per_sample / k,
            unoverlapped_seconds=compute.unoverlapped_seconds / k,
        ),
        network=dataclasses.replace(
            wires, latency=wires.latency / k, rack_latency=wires.rack_latency / k
        ),
        background=dataclasses.replace(
            others, trace=tuple((at / k, share) for at, share in others.trace),
            repeat=others.repeat / k, every=others.every / k, lasts=others.lasts / k,
        ),
        phases=dataclasses.replace(
            phases, every=phases.every / k, lasts=phases.lasts / k,
            jitter_lasts=phases.jitter_lasts / k,
        ),
        sites=dataclasses.replace(
            faster.sites, latency=tuple(tuple(t / k for t in row) for row in sites.latency)
        ),
    )  # fmt: skip


SCALED = ("all_reduce", "local_sgd:period=2", "sync_server", "d_psgd", "push_sum")


@pytest.mark.parametrize("method", only(SCALED[:1], SCALED))
@given(cluster=CLUSTERS, k=st.sampled_from([2.0, 5.0, 16.0]))
@settings(max_examples=4)
def test_everything_k_times_as_fast_takes_a_kth_of_the_time(
    method: str, cluster: Cluster, k: float
) -> None:
    """Up to whole nanoseconds: no time is hidden anywhere."""
    slow = timed(method, cluster, model_bytes=MEGABYTE).virtual_seconds
    fast = timed(method, times_as_fast(cluster, k), model_bytes=MEGABYTE).virtual_seconds
    assert k * fast == pytest.approx(slow, rel=1e-4)


@pytest.mark.parametrize("method", ["all_reduce", "sync_server"])
@given(
    rate=st.floats(1e6, 1e9), k=st.floats(1.0, 20.0), racks=st.sampled_from([0, 2]),
    collectives=st.sampled_from(["closed_form", "flows"]),
)  # fmt: skip
@settings(max_examples=5)
def test_more_bandwidth_for_all_never_slows_a_run(
    method: str, rate: float, k: float, racks: int, collectives: str
) -> None:
    """Of methods that everyone waits in, alone on equal links."""
    cluster = dataclasses.replace(
        quiet(4, bandwidth=rate, latency=1e-4, collectives=collectives), machines_per_rack=racks
    )
    slow = timed(method, cluster, model_bytes=MEGABYTE).virtual_seconds
    fast = timed(method, cluster.with_bandwidth_times(k), model_bytes=MEGABYTE).virtual_seconds
    assert fast <= slow + 1e-7


@pytest.mark.parametrize("method", only(["ad_psgd", "all_reduce", "downpour"], sorted(METHODS)))
def test_caps_equal_to_the_rate_of_the_cards_are_the_plain_network(method: str) -> None:
    """Bit for bit: the events of the run, whatever the method."""
    plain = Cluster(workers=4, network=Wires(latency=1e-3, collectives="flows"))
    rate = plain.network.bandwidth
    capped = at_sites(plain, rate, 1e-3)
    assert timed(method, capped, model_bytes=MEGABYTE).digest == (
        timed(method, plain, model_bytes=MEGABYTE).digest
    )


@wide
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_trains_where_everything_is_shared(method: str) -> None:
    """All that a description can have at once, with a death and a slow link; twice the same."""
    cluster = cluster_from(
        {**load_cluster("home-dsl-8").as_dict(), "machines_per_rack": 3}
        | {"sites": load_cluster("halos-geo-16").as_dict()["sites"] | {"shared": True}}
    )
    wires = dataclasses.replace(cluster.network, uplink=5e6, processor_share=0.1)
    busy = Background("sites", load=0.5, every=0.5, lasts=0.5)
    cluster = dataclasses.replace(cluster, network=wires, background=busy).changed(
        faults=[Fault("kill", at=0.4, worker=5), Fault("slow-link", at=0.2, lasts=1.0, worker=1,
                                                       amount=3.0)]
    )  # fmt: skip
    first, second = (timed(method, cluster, model_bytes=MEGABYTE) for _ in range(2))
    assert first.digest == second.digest
    assert first.steps >= 6 * 7
