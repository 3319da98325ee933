"""Sites, racks, other traffic and shared slowness as people describe them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.config.cluster import Cluster, cluster_from, load_cluster
from gossamer.config.network import Background, Sites
from gossamer.errors import ConfigurationError

SITES = '[sites]\nnames = ["a", "b"]\n'
BURSTS = "load = 0.5\nevery = 1\nlasts = 1\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (SITES + "bandwidth = [[0, 1e6]]", "a square matrix with 2 rows of 2, one for each site"),
        (SITES + "latency = [[0, 1], [1]]", "got 2 rows of 2, 1"),
        (SITES + "bandwidth = [[0, 0], [1, 0]]", "bandwidth from a to b must be above 0 and"),
        (SITES + "bandwidth = [[0, -1], [1, 0]]", "[sites] bandwidth must be a bandwidth such as"),
        (SITES + "latency = [[0, -1], [1, 0]]", "[sites] latency must be a time such as"),
        (SITES + "latency = 3", "[sites] latency must be a list, got 3"),
        (SITES + "machines = [1]", "machines must be 2 numbers from 1 on, one for each site"),
        (SITES + "machines = [1, 0]", "machines must be 2 numbers from 1 on, one for each site"),
        (SITES + "machines = [1, 1.5]", "machines must be whole numbers, got [1, 1.5]"),
        (SITES + 'servers = "c"', "unknown site 'c'"),
        (SITES + 'bandwidth = [[0, 1], [1, 0]]\nshared = [["a", "c"]]', "unknown site 'c'"),
        (SITES + "shared = true", "shared needs the bandwidth of the pipes; give the matrix"),
        (SITES + 'shared = [["a"]]', "shared must be true or pairs such as"),
        (SITES + "name = 1", "unknown key of [sites] 'name'; did you mean 'names'?"),
        ('[sites]\nnames = ["a", "a"]', "names 'a' twice; give each site a name of its own"),
        ("[sites]\nnames = [1]", "[sites] names must be a name in quotes, got 1"),
        ("[sites]\nmachines = [1]", "[sites] needs names, such as"),
        ("[network]\nup = -1", "up must be a bandwidth such as"),
        ("[network]\nprocessor_share = 1", "processor_share must be at least 0 and below 1"),
        ("[network]\ncollectives = 'flow'", "unknown collectives 'flow'; did you mean 'flows'?"),
        ("[network]\nuplink = 1", "uplink is that of a rack; say how many machines_per_rack"),
        (
            "machines_per_rack = 2\n[network]\nuplink = 1\noversubscription = 2",
            "both say what leaving a rack costs",
        ),
        ("[background]\nload = 1.5", "background load must be at least 0 and below 1, got 1.5"),
        ("[background]\nload = 0.5", "[background] load needs every and lasts, both above 0"),
        (f"[background]\n{BURSTS}on = 'racks'", "unknown links of [background] on 'racks'"),
        (f"[background]\n{BURSTS}on = 'uplinks'", 'on = "uplinks" needs racks with an uplink'),
        (f"[background]\n{BURSTS}on = 'sites'", 'on = "sites" needs pipes between them'),
        (f"[background]\n{BURSTS}trace = [[0, 0]]", "has a trace and a load; give one of them"),
        ("[background]\nload = 0.5\nevery = '1ns'\nlasts = 1", "must be 0 or at least 1us, got"),
        ("[background]\ntrace = [[0, 1]]", "a share must be at least 0 and below 1, got 1 at 0 s"),
        ("[background]\ntrace = [[1, 0], [1, 0]]", "must grow from 0 on, got 1 as the 2. time"),
        (
            "[background]\ntrace = [[1]]",
            "must be the name of a file, or pairs of seconds and share",
        ),
        ("[background]\ntrace = [[0, 0], [5, 0]]\nrepeat = 5", "must be longer than the trace"),
        ("[background]\ntrace = 'no.csv'", "no.csv' cannot be read: No such file"),
        ("[phases]\nshared_by = 'town'", "unknown group of [phases] shared_by 'town'"),
        ("[phases]\nfactor = 2", "[phases] factor needs every and lasts, both above 0"),
        ("[phases]\nfactor = 0", "phases factor must be above 0 and finite, got 0"),
        ("[phases]\njitter = -1", "phases jitter must be at least 0, got -1"),
        ("[phases]\nshared_by = 'site'\njitter = 1", 'shared_by = "site" needs sites'),
    ],
)
def test_a_network_that_cannot_be_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    """In one sentence that says what is wrong."""
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        load_cluster(path)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("trace", "sentence"),
    [
        ("", "must have 1 to 100000 lines of seconds,share, got none"),
        ("seconds,share\n", "must have 1 to 100000 lines of seconds,share, got none"),
        ("0,0.1\n1;0.2\n", "entry 2: expected seconds and a share such as 1.5,0.3, got '1;0.2'"),
        ("0,0.1\n1,0.2,9\n", "entry 2: expected seconds and a share such as 1.5,0.3"),
        ("0,0.1\n1,many\n", "entry 2: expected seconds and a share such as 1.5,0.3, got '1,many'"),
        ("0,nan\n", "a share must be at least 0 and below 1, got nan at 0 s"),
        ("5,0.1\n1,0.2\n", "the times must grow from 0 on, got 1 as the 2. time"),
        (b"\xff\xfe\x00", "cannot be read: it is no table of numbers"),
    ],
)
def test_a_damaged_trace_is_refused(tmp_path: Path, trace: str | bytes, sentence: str) -> None:
    """With the file and the place in it."""
    whole = trace.encode() if isinstance(trace, str) else trace
    (tmp_path / "traffic.csv").write_bytes(whole)
    (tmp_path / "wrong.toml").write_text('[background]\ntrace = "traffic.csv"\n')
    with pytest.raises(ConfigurationError) as refused:
        load_cluster(tmp_path / "wrong.toml")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_trace_stands_beside_its_description_and_goes_into_the_run_folder(tmp_path: Path) -> None:
    """With a line of titles or without; the resolved cluster needs the file no more."""
    (tmp_path / "traffic.csv").write_text("seconds,share\n0,0.25\n\n1.5,0.5\n")
    path = tmp_path / "office.toml"
    path.write_text('[background]\ntrace = "traffic.csv"\nrepeat = "1m"\n')
    cluster = load_cluster(path)
    assert cluster.background == Background(trace=((0.0, 0.25), (1.5, 0.5)), repeat=60.0)
    assert cluster_from(cluster.as_dict()) == cluster


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 40)
)  # fmt: skip
def test_another_number_of_machines_is_spread_alike(
    counts: list[int], times: int, workers: int
) -> None:
    """In order, no site ahead of its share by a machine or more; a multiple in exact proportion."""
    names = tuple(f"site{at}" for at in range(len(counts)))
    sites = Sites(names=names, machines=tuple(counts))
    found = [Cluster(workers=workers, sites=sites).site_of(rank) for rank in range(workers)]
    assert found == sorted(found)
    for site, count in enumerate(counts):
        assert abs(found.count(site) - workers * count / sum(counts)) < 1
    whole = Cluster(workers=times * sum(counts), sites=sites)
    exact = [site for site, count in enumerate(counts) for _ in range(times * count)]
    assert [whole.site_of(rank) for rank in range(whole.workers)] == exact


def test_servers_stand_where_they_are_said_to() -> None:
    """At the first site, or at the one that is named."""
    sites = Sites(names=("a", "b"), machines=(1, 1), servers="b")
    assert Cluster(workers=2, sites=sites).site_of(2) == 1
    assert Cluster(workers=2, sites=Sites(names=("a", "b"), machines=(1, 1))).site_of(2) == 0
