"""From findings to a cluster and to the file that the simulator reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from findings_made import found
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import simulate
from gossamer.config.cluster import Wires, load_cluster
from gossamer.plan.probe import ProbeFindings, describe, to_toml
from gossamer.plan.probe.description import notices, workers_per_machine

LAW = settings(max_examples=30)
FOUR = ["a", "b", "c", "d"]


def traits(findings: ProbeFindings) -> set[str]:
    return {str(fault) for fault in describe(findings).faults}


def test_equal_machines_are_described_by_one_number() -> None:
    """The typical value, and no exceptions."""
    cluster = describe(
        found(FOUR, step=0.02, jitter=0.08, other=0.003, cards=[1e9, 1.1e9, 1e9, 9e8])
    )
    assert cluster.faults == ()
    assert cluster.compute.seconds == pytest.approx(0.02, rel=0.02)
    assert cluster.compute.jitter == pytest.approx(0.08, rel=0.2)
    assert cluster.compute.unoverlapped_seconds == pytest.approx(0.003)
    assert cluster.network.bandwidth == pytest.approx(1e9, rel=0.11)
    assert cluster.network.latency == pytest.approx(50e-6)
    assert cluster.network.memory_bandwidth == 0


@LAW
@given(st.integers(2, 6), st.floats(1.5, 50.0), st.integers(0, 5))
def test_a_slow_worker_is_named_with_its_factor(workers: int, factor: float, which: int) -> None:
    """The typical time is that of the others, also if there is only one other."""
    slow = which % workers
    factors = [factor if rank == slow else 1.0 for rank in range(workers)]
    cluster = describe(found([f"h{rank}" for rank in range(workers)], factors=factors))
    assert [(fault.kind, fault.worker) for fault in cluster.faults] == [("slow", slow)]
    assert cluster.faults[0].amount == pytest.approx(factor, rel=0.05)
    assert cluster.compute.seconds == pytest.approx(0.010, rel=0.05)


def test_a_worker_a_little_slower_is_typical() -> None:
    """Below one and a quarter nobody is named."""
    assert traits(found(FOUR, factors=[1, 1.15, 1, 0.9])) == set()


def test_a_fast_worker_is_named_too() -> None:
    """Of three it is the one that differs."""
    (fault,) = describe(found(FOUR[:3], factors=[1, 0.5, 1])).faults
    assert (fault.kind, fault.worker) == ("slow", 1)
    assert fault.amount == pytest.approx(0.5, rel=0.05)


def test_one_long_stop_makes_no_worker_slow() -> None:
    """Its mean is far off, its median is not."""
    findings = found(FOUR)
    findings.steps[2].compute[5] = 60.0
    cluster = describe(findings)
    assert cluster.faults == ()
    assert cluster.compute.pause_probability == pytest.approx(1 / 800)
    assert cluster.compute.pause_seconds == pytest.approx(60.0, rel=0.05)


@LAW
@given(st.integers(0, 3), st.floats(1.6, 100.0))
def test_a_slow_card_is_named_with_its_factor(which: int, factor: float) -> None:
    """All its links are slow, and the others' cards are not blamed for theirs with it."""
    cards = [1e9 / factor if host == which else 1e9 for host in range(4)]
    cluster = describe(found(FOUR, cards=cards))
    assert [(fault.kind, fault.worker) for fault in cluster.faults] == [("slow-link", which)]
    assert cluster.faults[0].amount == pytest.approx(factor, rel=0.01)
    assert cluster.network.bandwidth == pytest.approx(1e9)


def test_a_card_is_slowed_once_for_all_workers_behind_it() -> None:
    """In a cluster file a machine's card belongs to each of its workers."""
    cluster = describe(found([*"aabbcc"], cards=[1e9, 1e8, 1e9]))
    assert cluster.workers_per_machine == 2
    assert {str(fault) for fault in cluster.faults} == {"slow-link 2=10"}


def test_of_two_hosts_neither_is_blamed() -> None:
    """Their one link has one bandwidth."""
    cluster = describe(found(["a", "b"], cards=[1e9, 1e7]))
    assert cluster.faults == ()
    assert cluster.network.bandwidth == pytest.approx(1e7)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("aaaa", 4), ("aabb", 2), ("abcd", 1), ("abab", 1), ("aaab", 1), ("aba", 1), ("a", 1)],
)
def test_workers_share_machines_if_they_do_so_regularly(hosts: str, expected: int) -> None:
    """As many on each, in order of rank: what a cluster file can say."""
    assert workers_per_machine(hosts) == expected


def test_inside_a_machine_what_a_crowd_gets_counts() -> None:
    """The simulator's transfers through memory do not share it."""
    cluster = describe(found([*"aabb"], memory=4e9, crowded=0.25))
    assert cluster.network.memory_bandwidth == pytest.approx(1e9)
    assert cluster.network.bandwidth == pytest.approx(1e9)


def test_what_a_file_cannot_say_is_noted() -> None:
    """One worker, one host, uneven hosts, a shared switch, pairs that were left out."""
    assert "no peers" in notices(found(["a"]))[0]
    assert "gossamer probe -n 4" in notices(found(["a"]))[0]
    assert "share one host" in notices(found(["a", "a"]))[0]
    assert "different numbers of workers" in notices(found(["a", "a", "b"]))[0]
    assert "50 % of what it gets alone" in notices(found(FOUR, crowded=0.5))[0]
    fewer = dataclasses.replace(found(FOUR), pairs=10)
    assert "6 of 10 pairs were measured" in notices(fewer)[0]
    assert notices(found(FOUR)) == []


def test_one_worker_leaves_the_network_at_its_defaults() -> None:
    """And the file says that they were not measured."""
    findings = found(["a"])
    cluster = describe(findings)
    assert cluster.network == Wires()
    assert "# Not measured" in to_toml(cluster, findings).partition("[network]")[2]


@LAW
@given(
    hosts=st.lists(st.sampled_from("abc"), min_size=1, max_size=6),
    step=st.floats(1e-6, 100.0),
    jitter=st.floats(0.0, 0.4),
    other=st.floats(0.0, 1.0),
    latency=st.floats(1e-7, 1.0),
    speed=st.floats(1e3, 1e11),
    factors=st.lists(st.floats(0.2, 20.0), min_size=6, max_size=6),
)
def test_the_file_reads_back_as_the_cluster(
    tmp_path_factory: pytest.TempPathFactory, hosts: list[str], step: float, jitter: float,
    other: float, latency: float, speed: float, factors: list[float],
) -> None:  # fmt: skip
    """Every number within the digits that are written, every name and fault exactly."""
    cards = [speed] * len(set(hosts))
    findings = found(
        hosts, step=step, jitter=jitter, other=other, latency=latency, cards=cards,
        memory=3 * speed, factors=factors[: len(hosts)], samples=40,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("probe") / "measured.toml"
    cluster = describe(findings)
    path.write_text(to_toml(cluster, findings), encoding="utf-8")
    read = load_cluster(path)
    assert (read.name, read.title, read.faults) == (cluster.name, cluster.title, cluster.faults)
    assert (read.workers, read.workers_per_machine) == (len(hosts), cluster.workers_per_machine)
    for part in ("compute", "network"):
        wanted, got = (
            dataclasses.asdict(getattr(cluster, part)),
            dataclasses.asdict(getattr(read, part)),
        )
        for key, value in wanted.items():
            expected = value if isinstance(value, str) else pytest.approx(value, rel=1e-3, abs=1e-4)
            assert got[key] == expected, key
    assert all(len(line) <= 100 for line in path.read_text().splitlines() if "worker" not in line)


def test_findings_travel_as_json() -> None:
    """From worker 0 to whoever started it."""
    findings = found([*"aab"])
    assert ProbeFindings.from_dict(json.loads(json.dumps(findings.as_dict()))) == findings


def test_the_simulator_runs_on_what_was_measured(tmp_path: Path) -> None:
    """Three typical workers and one at a quarter of their pace share the epochs."""
    findings = found(FOUR, factors=[4, 1, 1, 1], jitter=0.05)
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(describe(findings), findings), encoding="utf-8")
    run = simulate("digits-logistic", "ad_psgd", path, epochs=2, engine="none")
    # An epoch of 1437 samples in batches of 16, a gradient in 10 ms and 1 ms besides.
    typical, slow = 1 / 0.011, 1 / 0.041
    assert run.virtual_seconds == pytest.approx(2 * 1437 / 16 / (3 * typical + slow), rel=0.1)
