"""Clusters as people describe them, and what the described parts do to a run."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.config.cluster import (
    DISTRIBUTIONS,
    Cluster,
    Compute,
    Wires,
    cluster_from,
    clusters,
    load_cluster,
)
from gossamer.config.collective_costs import COLLECTIVES, all_reduce_seconds
from gossamer.config.faults import KINDS, Fault, parse_fault
from gossamer.errors import ConfigurationError, PeerLost
from gossamer.quantities import bytes_per_second, seconds
from gossamer.replica import Replica
from gossamer.runs.result import Result
from gossamer.worker import Worker
from support import Role, bowl, build, cluster_of, only_here, random_faults

MODEL = 1_000_000


def timed(method: str, cluster: Cluster, steps: int = 20, **choices: Any) -> Result:
    """A run without gradients: a question about time only."""
    return build(bowl(), method, cluster, steps=steps, engine="none", **choices).run()


def told(role: Role, cluster: Cluster) -> Result:
    """A run of a method that exists in one test only."""
    return build(bowl(), only_here(role), cluster, steps=1, engine="none").run()


# ---------------------------------------------------------------------- descriptions


@pytest.mark.parametrize("name", clusters())
def test_every_preset_loads_says_what_it_is_and_runs(name: str) -> None:
    """With a title, and with every key understood; what is written into a run's folder reads back
    as the same cluster."""
    cluster = load_cluster(name)
    assert cluster.name == name
    assert clusters()[name] == cluster.title != ""
    assert cluster_from(cluster.as_dict()) == cluster
    assert timed("all_reduce", cluster, steps=2).steps == 2 * cluster.workers


FAULTS = st.integers(0, 10_000).flatmap(lambda seed: st.sampled_from(plans(seed)))


def plans(seed: int) -> list[Fault]:
    return [Fault("drop", amount=0.1), *random_faults(seed, 8, 3.0, kills=3)]


@given(FAULTS)
def test_a_fault_reads_back_as_it_was_written(fault: Fault) -> None:
    """Exactly: a run can be repeated from its config.json."""
    kind, _, rest = str(fault).partition(" ")
    assert kind in KINDS
    assert parse_fault(kind, rest) == fault
    assert cluster_from(Cluster(faults=(fault,)).as_dict()).faults == (fault,)


def test_a_file_may_say_everything(tmp_path: Path) -> None:
    """Units in the values, slow workers as a table, other faults as lines."""
    path = tmp_path / "office.toml"
    path.write_text(
        """
        title = "four desktops"
        workers = 4
        deadline = "3s"
        faults = ["kill 3@2.5s", "partition 0,1|2-3@1s+2s"]
        [compute]
        seconds = "20ms"
        distribution = "lognormal"
        jitter = 1
        [network]
        bandwidth = "1Gbit"
        latency = 0.001
        memory_bandwidth = 0
        [slow]
        0 = 2.5
        [slow_link]
        1 = 10
        """
    )
    cluster = load_cluster(path)
    assert (cluster.name, cluster.workers, cluster.deadline) == ("office", 4, 3.0)
    assert (cluster.compute.seconds, cluster.compute.jitter) == (0.02, 1)
    assert (cluster.network.bandwidth, cluster.network.latency) == (125e6, 0.001)
    assert cluster.network.memory_bandwidth == 0
    assert [str(fault) for fault in cluster.faults] == [
        "slow 0=2.5", "slow-link 1=10", "kill 3@2.5s", "partition 0,1|2,3@1s+2s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("wokers = 4", "unknown key of [cluster] 'wokers'; did you mean 'workers'?"),
        ("[compute]\nsecond = 1", "unknown key of [compute] 'second'; did you mean 'seconds'?"),
        ("[network]\nlatecny = 1", "unknown key of [network] 'latecny'; did you mean 'latency'?"),
        ("workers = 0", "workers must be at least 1, got 0"),
        ("workers = 2.5", "[cluster] workers must be of type int, got 2.5"),
        ("workers = true", "[cluster] workers must be of type int, got True"),
        ("compute = 3", "compute must be a table of keys and values, got 3"),
        ("slow = [1]", "slow must be a table of keys and values, got [1]"),
        ("faults = 'kill 3@1s'", "faults must be a list"),
        ("faults = ['kil 3@1s']", "unknown fault 'kil'; did you mean 'kill'?"),
        ("faults = ['kill 9@1s']", "the fault 'kill 9@1s' names worker 9, but the 8 workers"),
        ("[slow]\nx = 10", "--slow cannot read 'x=10'; write it as 0=10"),
        ("[compute]\nseconds = 0", "compute seconds must be above 0, got 0"),
        ("[compute]\nseconds = nan", "must be a time such as 50us, 10ms, 90s, 5m or 1h, got nan"),
        ("[compute]\nseconds = [1]", "seconds must be a time such as"),
        ("[compute]\njitter = nan", "jitter must be a finite number of at least 0, got nan"),
        ("[compute]\njitter = 'x'", "[compute] jitter must be of type float, got 'x'"),
        ("[compute]\ndistribution = 'gauss'", "unknown distribution 'gauss'"),
        ("[network]\nbandwidth = 0", "bandwidth must be a bandwidth such as 10Gbit"),
        ("[network]\nbandwidth = '10Gbits'", "bandwidth must be a bandwidth such as 10Gbit"),
        ("[network]\nbandwidth = true", "bandwidth must be a bandwidth such as 10Gbit"),
        ("[network]\nlatency = -1", "latency must be a time such as"),
        ("[network]\ncollective = 'rings'", "unknown collective 'rings'; did you mean 'ring'?"),
        ("workers = ", "is not valid TOML"),
    ],
)
def test_a_description_that_cannot_be_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    """In one sentence that says what is wrong and offers the nearest right name."""
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        load_cluster(path)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Likewise a folder, and a file that is not there."""
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    for place, reason in ((path, "it is no text"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigurationError, match=reason):
            load_cluster(f"{place}/" if place is tmp_path else place)
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_cluster(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "value"),
    [("50us", 50e-6), ("10ms", 0.01), ("2.5s", 2.5), ("3", 3.0), (".5", 0.5), ("2m", 120.0),
     ("1h", 3600.0), ("7ns", 7e-9), ("1e-3s", 1e-3), (0.25, 0.25), (4, 4.0), (" 1 s ", 1.0)],
)  # fmt: skip
def test_times_are_read_as_people_write_them(text: str | float, value: float) -> None:
    """A plain number is seconds."""
    assert seconds(text, "latency") == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "value"),
    [("10Gbit", 1.25e9), ("100Mbit", 12.5e6), ("1.25GB", 1.25e9), ("8bit", 1.0), ("3kB/s", 3e3),
     ("1 Tbit", 125e9), ("2MBps", 2e6), (1e9, 1e9), (7, 7.0)],
)  # fmt: skip
def test_bandwidths_are_read_as_people_write_them(text: str | float, value: float) -> None:
    """Bits and bytes; a plain number is bytes per second."""
    assert bytes_per_second(text, "bandwidth") == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", "1 week", "1e400", "nan", "inf", "1.2.3s", "1e13"]
)
def test_what_is_no_time_is_refused(text: str) -> None:
    """With examples of what is one."""
    with pytest.raises(ConfigurationError, match="latency must be a time such as 50us"):
        seconds(text, "latency")


@pytest.mark.parametrize("change", [
    {"kind": "kil"}, {"worker": -1}, {"lasts": 2.0}, {"at": -1.0}, {"at": float("nan")},
    {"amount": 3.0}, {"kind": "slow", "amount": 0.0}, {"kind": "pause"}, {"kind": "drop"},
    {"kind": "partition"}, {"kind": "partition", "worker": -1, "sides": (frozenset({1}),) * 2},
])  # fmt: skip
def test_a_fault_that_cannot_happen_is_refused(change: dict[str, Any]) -> None:
    """Also from Python, where nothing was parsed."""
    with pytest.raises(ConfigurationError, match=r"cannot happen|unknown fault"):
        Fault(**{"kind": "kill", "worker": 1, **change})


# ---------------------------------------------------------------------- computing


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_compute_times_have_the_mean_and_spread_asked_for(distribution: str) -> None:
    """Mean within 2 %; standard deviation within 5 % where it can be chosen."""
    compute = Compute(seconds=0.02, distribution=distribution, jitter=0.3)
    rng = random.Random(5)
    draws = [compute.draw(rng) for _ in range(20_000)]
    spread = {"constant": 0.0, "exponential": 1.0}.get(distribution, 0.3)
    assert min(draws) >= 0
    assert statistics.fmean(draws) == pytest.approx(0.02, rel=0.02)
    assert statistics.pstdev(draws) == pytest.approx(0.02 * spread, rel=0.05, abs=1e-12)


def test_a_random_straggler_strikes_as_often_as_it_should() -> None:
    """The mean step is longer by probability times pause."""
    compute = Compute(
        seconds=0.01, distribution="constant", pause_probability=0.1, pause_seconds=0.09
    )
    rng = random.Random(1)
    draws = [compute.draw(rng) for _ in range(20_000)]
    assert statistics.fmean(draws) == pytest.approx(0.019, rel=0.05)


def test_a_slow_worker_is_slower_while_it_is_slow() -> None:
    """Ten steps at ten times the time, the rest at its own; what is not computing is not scaled."""
    cluster = Cluster(
        workers=1,
        compute=Compute(seconds=0.01, distribution="constant", unoverlapped_seconds=0.002),
        faults=(Fault("slow", at=0.125, lasts=1.02, worker=0, amount=10.0),),
    )
    # 20 steps of 12 ms and 10, those that begin in its time, of 102 ms.
    assert timed("all_reduce", cluster, steps=30).virtual_seconds == pytest.approx(1.26, abs=1e-6)


# ---------------------------------------------------------------------- the network


def steps_per_second(workers: int, distribution: str) -> float:
    """Of workers around one server: 50 ms of computing, 1 ms of latency, M/B = 10 ms."""
    cluster = Cluster(
        workers=workers,
        compute=Compute(seconds=0.05, distribution=distribution),
        network=Wires(bandwidth=1e8, latency=1e-3),
    )
    result = timed("downpour", cluster, steps=60, model_bytes=MODEL)
    return result.steps / result.virtual_seconds


@pytest.mark.parametrize("workers", [1, 4, 16, 64])
def test_in_lockstep_a_server_gives_half_its_card(workers: int) -> None:
    """When all push at once, p models share the way up, then p share the way down: p steps take
    computing + 2 latency + 2 p M/B, and B / 2M steps a second are never passed."""
    expected = workers / (0.05 + 2 * 1e-3 + 2 * workers * 0.01)
    assert steps_per_second(workers, "constant") == pytest.approx(expected, rel=0.05)


def test_out_of_step_a_server_saturates_at_its_whole_card() -> None:
    """When some push while others fetch, the card is busy both ways (full duplex): adding workers
    helps until B / M = 100 steps a second, and not beyond."""
    few, some, many = (steps_per_second(workers, "exponential") for workers in (2, 32, 64))
    assert few == pytest.approx(2 / (0.05 + 2 * 1e-3 + 2 * 0.01), rel=0.1)
    assert some == pytest.approx(100.0, rel=0.1)
    assert many == pytest.approx(100.0, rel=0.1)
    assert max(some, many) <= 100.0


@pytest.mark.parametrize("algorithm", COLLECTIVES)
@pytest.mark.parametrize("workers", [2, 8, 12])
def test_an_all_reduce_step_costs_computing_and_the_closed_form(
    algorithm: str, workers: int
) -> None:
    """Within 1 %, where nothing else happens on the network."""
    cluster = Cluster(
        workers=workers,
        compute=Compute(seconds=0.01, distribution="constant"),
        network=Wires(bandwidth=1e8, latency=1e-3, collective=algorithm),
    )
    result = timed("all_reduce:overlap=false", cluster, steps=10, model_bytes=MODEL)
    expected = 0.01 + all_reduce_seconds(algorithm, workers, MODEL, 1e-3, 1e-8)
    assert result.virtual_seconds / 10 == pytest.approx(expected, rel=0.01)


# ---------------------------------------------------------------------- faults


def test_a_drop_is_a_delay_and_loses_nothing() -> None:
    """Every message arrives, once and in order, late by 0.02 p / (1 - p) on average."""
    messages, got = 4000, list[int]()

    async def talks(w: Worker, x: Replica) -> None:
        for number in range(messages):
            if w.rank == 0:
                await w.send(1, number, tag="number")
            else:
                got.append((await w.receive("number")).payload)

    result = told(talks, cluster_of(2, latency=1e-3, faults=[Fault("drop", amount=0.4)]))
    assert got == list(range(messages))
    expected = messages * (1e-3 + 0.02 * 0.4 / 0.6)
    assert result.virtual_seconds == pytest.approx(expected, rel=0.1)


def times_of_arrival(*faults: Fault, deadline: float = 10.0) -> list[float]:
    """When messages arrive that are sent every 0.1 s over a latency of 1 ms."""
    got: list[float] = []

    async def talks(w: Worker, x: Replica) -> None:
        for _ in range(8):
            if w.rank == 0:
                w.send(1, 1, tag="tick")
                await w.sleep(0.1)
            else:
                await w.receive("tick")
                got.append(w.now())

    told(talks, cluster_of(2, latency=1e-3, faults=faults, deadline=deadline))
    return got


def test_a_delay_is_added_while_it_lasts() -> None:
    """To every message sent in its time, and to no other."""
    late = times_of_arrival(Fault("delay", at=0.25, lasts=0.2, amount=0.05))
    expected = [0.1 * n + 0.001 + (0.05 if n in (3, 4) else 0.0) for n in range(8)]
    assert late == pytest.approx(expected, abs=1e-6)


def test_a_partition_holds_messages_until_it_heals() -> None:
    """They arrive then, in order; those before and after are not touched."""
    sides = (frozenset({0}), frozenset({1}))
    held = times_of_arrival(Fault("partition", at=0.15, lasts=0.4, sides=sides))
    expected = [max(0.1 * n + 0.001, 0.55 if 2 <= n <= 5 else 0.0) for n in range(8)]
    assert held == pytest.approx(expected, abs=2e-3)
    assert held == sorted(held)


def live_of(rank: int, cluster: Cluster) -> dict[float, int]:
    """How many workers one of them believes alive, every 0.1 s."""
    seen: dict[float, int] = {}

    async def looks(w: Worker, x: Replica) -> None:
        for _ in range(10):
            await w.sleep(0.1)
            if w.rank == rank:
                seen[round(w.now(), 3)] = len(w.live)

    told(looks, cluster)
    return seen


def test_live_shrinks_when_a_death_is_noticed() -> None:
    """Not at the death, but `failure_detection` later; and it never grows again."""
    kill = Fault("kill", at=0.25, worker=2)
    seen = live_of(0, cluster_of(4, faults=[kill], failure_detection=0.2))
    assert seen == {t / 10: 4 if t <= 4 else 3 for t in range(1, 11)}


def test_live_shrinks_after_the_deadline_of_a_partition_and_grows_when_it_heals() -> None:
    """Each side counts the other as lost in between; who is on no side sees everybody."""
    cut = Fault("partition", at=0.25, lasts=0.5, sides=(frozenset({0, 1}), frozenset({2})))
    cluster = cluster_of(4, faults=[cut], deadline=0.2)
    assert live_of(0, cluster) == {t / 10: 3 if t in (5, 6, 7) else 4 for t in range(1, 11)}
    assert live_of(2, cluster) == {t / 10: 2 if t in (5, 6, 7) else 4 for t in range(1, 11)}
    assert set(live_of(3, cluster).values()) == {4}


def test_a_partition_beyond_the_deadline_fails_who_waits_across() -> None:
    """At the deadline, with the peer's name."""
    failed: list[tuple[int, float]] = []

    async def waits(w: Worker, x: Replica) -> None:
        try:
            await w.receive("never", source=1 - w.rank)
        except PeerLost as error:
            failed.append((error.peer, w.now()))

    cut = Fault("partition", at=0.1, sides=(frozenset({0}), frozenset({1})))
    told(waits, cluster_of(2, faults=[cut], deadline=0.3))
    assert sorted(failed) == [(0, pytest.approx(0.4)), (1, pytest.approx(0.4))]
