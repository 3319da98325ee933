"""`gossamer probe` on four hosts of which two stand elsewhere.

Slow, and for root only: `make hosts` runs it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import Hosts

from gossamer.config.cluster import Cluster, load_cluster

pytestmark = pytest.mark.hosts

TORCHRUN = Path(sys.executable).parent / "torchrun"
MBIT = 1e6 / 8
CARD, CROSSING = 100, 20
"""What the hosts' cards carry, as the fixture makes them, and what crosses, in Mbit/s."""


def probed(hosts: Hosts, out: Path) -> tuple[Cluster, str]:
    """The cluster that four hosts find, and the file."""
    command = [
        str(TORCHRUN), "--nnodes", "4", "--nproc-per-node", "1", "--master-addr", "node0",
        "--master-port", "29500",
    ]  # fmt: skip
    program = ["-m", "gossamer", "probe", "--seconds", "24", "--out", str(out), "--force"]
    processes = [
        hosts.start(
            host, [*command, "--node-rank", str(host), *program],
            environment={"OMP_NUM_THREADS": "1"},
        )
        for host in range(4)
    ]  # fmt: skip
    written = [finished(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], "\n".join(written)
    return load_cluster(out), out.read_text()


def finished(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=150)[0]


@pytest.mark.parametrize("shared", [True, False])
def test_two_sites_and_what_crosses_between_them_are_found(
    hosts: Hosts, tmp_path: Path, shared: bool
) -> None:
    """Who stands where, the rate within and across, and whether the flows across share it."""
    with hosts.divided([2, 3], CROSSING, shared=shared):
        cluster, text = probed(hosts, tmp_path / "sites.toml")
    sites = cluster.sites
    assert sites.machines == (2, 2), text
    assert (sites.shared == (("site0", "site1"),)) == shared, text
    assert cluster.network.bandwidth / MBIT == pytest.approx(CARD, rel=0.25), text
    for one, other in ((0, 1), (1, 0)):
        assert sites.bandwidth[one][other] / MBIT == pytest.approx(CROSSING, rel=0.25), text


def test_hosts_in_one_place_are_one_site(hosts: Hosts, tmp_path: Path) -> None:
    """Nothing is found where nothing is."""
    cluster, text = probed(hosts, tmp_path / "one.toml")
    assert cluster.sites.names == (), text
    assert cluster.machines_per_rack == 0, text
