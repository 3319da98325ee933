"""Sites and racks, found in what was measured between pairs of hosts."""

from __future__ import annotations

import dataclasses

import pytest
from findings_made import found
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.config.cluster import Cluster, load_cluster
from gossamer.plan.probe.description import describe, notices
from gossamer.plan.probe.findings import Crowd, ProbeFindings
from gossamer.plan.probe.regions import across, regions_of
from gossamer.plan.probe.toml_text import to_toml

CARD = 1e9


def apart(
    places: str, *, distance: float = 1.0, rate: float = CARD, together: float | None = None
) -> ProbeFindings:
    """One worker on each host, at the place that its letter names; what crosses is so many times
    as far and has this rate alone, and `together` in sum where it shares a link."""
    hosts = [f"{place}{number}" for number, place in enumerate(places)]
    plain = found(hosts)
    links = [
        dataclasses.replace(link, latency=link.latency * distance, bandwidth=min(CARD, rate),
                            shortest=link.latency * distance)
        if hosts[link.source][0] != hosts[link.target][0]
        else link
        for link in plain.links
    ]  # fmt: skip
    groups = [[host for host in hosts if host[0] == place] for place in dict.fromkeys(places)]
    crowds = list(plain.crowds)
    for pattern, senders in (("one_across", 1), ("across", None)):
        sends = across(hosts, groups, senders=senders)
        each = rate if together is None else together * len(groups) / max(1, len(sends))
        rates = dict.fromkeys(sends, rate if senders else each)
        crowds.append(Crowd(pattern, len(sends), None, rates))
    return dataclasses.replace(plain, links=links, crowds=crowds)


def read_back(findings: ProbeFindings, tmp_path: object) -> Cluster:
    """As the file says it, which the simulator runs on."""
    path = f"{tmp_path}/found.toml"
    with open(path, "w", encoding="utf-8") as file:
        file.write(to_toml(describe(findings), findings))
    return load_cluster(path)


@given(
    sizes=st.lists(st.integers(2, 4), min_size=2, max_size=4), far=st.floats(20.0, 1000.0),
    thin=st.booleans(), noise=st.randoms(),
)  # fmt: skip
@settings(max_examples=25)
def test_hosts_are_grouped_by_distance_or_by_rate(sizes, far, thin, noise) -> None:
    """Whatever the sizes, with noise of 20 %, in whatever order the links were measured."""
    places = "".join(chr(97 + at) * size for at, size in enumerate(sizes))
    findings = apart(places, rate=CARD / 10) if thin else apart(places, distance=far)
    links = [
        dataclasses.replace(
            link, shortest=link.shortest * noise.uniform(0.9, 1.1),
            bandwidth=link.bandwidth * noise.uniform(0.9, 1.1),
        )
        for link in findings.links
    ]  # fmt: skip
    noise.shuffle(links)
    expected = [[host for host in findings.hosts if host[0] == p] for p in dict.fromkeys(places)]
    assert regions_of(findings.hosts, links) == expected


@pytest.mark.parametrize(
    "findings",
    [
        apart("aaaa"),
        apart("ab", distance=100.0),
        found(list("abcd"), cards=[1e9, 1e9, 1e9, 1e8]),
        apart("aaab", rate=CARD / 10),
    ],
    ids=["equal hosts", "two hosts", "a slow card", "one host behind a thin link"],
)
def test_what_a_card_can_explain_is_no_site(findings: ProbeFindings) -> None:
    """Nor can two hosts be told from two sites of one."""
    assert len(regions_of(findings.hosts, findings.links)) == 1


@pytest.mark.parametrize(("together", "shared"), [(None, False), (1e8, True)])
def test_sites_are_written_as_a_matrix(tmp_path, together: float | None, shared: bool) -> None:
    """With the rate of one flow, or of the pipe if all flows share it."""
    findings = apart("aabb", distance=100.0, rate=1e8, together=together)
    cluster = read_back(findings, tmp_path)
    assert cluster.sites.machines == (2, 2)
    assert cluster.sites.bandwidth == ((0.0, 1e8), (1e8, 0.0))
    near, far = pytest.approx(50e-6), pytest.approx(5e-3)
    assert cluster.sites.latency == ((near, far), (far, near))
    assert bool(cluster.sites.shared) == shared
    assert (cluster.network.bandwidth, cluster.network.latency) == (CARD, near)
    assert cluster.faults == ()


@pytest.mark.parametrize(("together", "uplink"), [(None, 0.0), (1.5e9, 1.5e9)])
def test_racks_have_an_uplink_if_it_was_full(
    tmp_path, together: float | None, uplink: float
) -> None:
    """Groups of one size, a little farther apart, that one flow crosses at full rate."""
    cluster = read_back(apart("aaabbb", distance=2.0, together=together), tmp_path)
    assert (cluster.machines_per_rack, cluster.sites.names) == (3, ())
    assert cluster.network.rack_latency == pytest.approx(50e-6)
    assert cluster.network.uplink == uplink


def test_hosts_that_are_all_far_apart_are_sites_of_one() -> None:
    """One host in each of three regions, at three distances."""
    findings = apart("abc", distance=100.0)
    times = {("a", "b"): 10e-3, ("b", "c"): 20e-3, ("a", "c"): 60e-3}

    def between(one: str, other: str) -> float:
        return times[min(one[0], other[0]), max(one[0], other[0])]

    hosts = findings.hosts
    links = [
        dataclasses.replace(link, shortest=between(hosts[link.source], hosts[link.target]))
        for link in findings.links
    ]
    sites = describe(dataclasses.replace(findings, links=links)).sites
    assert sites.machines == (1, 1, 1)
    assert sites.latency == ((0.0, 10e-3, 60e-3), (10e-3, 0.0, 20e-3), (60e-3, 20e-3, 0.0))


def test_groups_out_of_order_are_noted_and_not_described() -> None:
    """A file counts machines in order of rank."""
    findings = apart("abab", distance=100.0)
    assert describe(findings).sites.names == ()
    assert any("2 groups of near hosts were found" in notice for notice in notices(findings))


def test_crowds_across_meet_at_no_host() -> None:
    """From each group to the next; as many pairs as the smaller of the two has hosts."""
    hosts = ["a", "a", "b", "c", "d", "e"]
    groups = [["a", "b"], ["c", "d", "e"]]
    assert across(hosts, groups) == {0: 3, 2: 4, 3: 0, 4: 2}
    assert across(hosts, groups, senders=1) == {0: 3, 3: 0}
    assert across(hosts, [["a", "b", "c", "d", "e"]]) == {}
