"""One run on four hosts, each a network namespace behind a link of 100 Mbit/s.

Slow, and for root only: `make hosts` runs them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from namespaces import Hosts

pytestmark = pytest.mark.hosts

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
JOINED = HERE / "joined.py"
LIMIT_S = 300
LINE = re.compile(
    r"worker (\d) of 4 on node(\d) (\w+) live=([\d,]+) loss=([\d.]+)>([\d.]+) sum=(\S+)"
)
ON_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass
class Report:
    """What one worker printed."""

    rank: int
    host: int
    transport: str
    live: str
    before: float
    after: float
    total: str


def reports(written: str) -> dict[int, Report]:
    found = [LINE.search(line) for line in written.splitlines()]
    made = [
        Report(int(m[1]), int(m[2]), m[3], m[4], float(m[5]), float(m[6]), m[7])
        for m in found if m is not None
    ]  # fmt: skip
    return {report.rank: report for report in made}


def finish(processes: Sequence[subprocess.Popen[str]]) -> tuple[list[int], str]:
    """Exit codes, and everything that was written."""
    written = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    return [process.returncode for process in processes], "\n".join(written)


def gossamer_run(hosts: Hosts, *script: str, pace_s: float = 0.0) -> list[subprocess.Popen[str]]:
    """One launcher on each host; they meet at the name of the first."""
    command = [
        str(BIN / "gossamer"), "run", "-n", "1", "--nnodes", "4", "--rendezvous", "node0:29400",
        "--tolerate-deaths", "--deadline", "120",
    ]  # fmt: skip
    return [
        hosts.start(
            host, [*command, "--node-rank", str(host), str(JOINED), *script],
            environment={**ON_ONE_THREAD, "PACE_S": str(pace_s)},
        )
        for host in range(4)
    ]  # fmt: skip


def check(found: dict[int, Report], written: str, transport: str, living: Sequence[int]) -> None:
    """Each on a host of its own, all with the same view and a model that has learnt."""
    assert sorted(found) == list(living), written
    for report in found.values():
        assert report.host == report.rank
        assert report.transport == transport
        assert report.live == ",".join(map(str, living))
        assert report.after < 0.9 * report.before


@pytest.mark.parametrize("method", ["pull_gossip", "ad_psgd", "all_reduce", "sync_server"])
def test_gossamer_run_trains_across_hosts(hosts: Hosts, tmp_path: Path, method: str) -> None:
    """Without a word about interfaces or addresses beyond the rendezvous."""
    codes, written = finish(gossamer_run(hosts, method, "30", str(tmp_path)))
    assert codes == [0, 0, 0, 0], written
    check(reports(written), written, "torch", range(4))


@pytest.mark.parametrize("method", ["pull_gossip", "ad_psgd", "all_reduce", "sync_server"])
def test_torchrun_trains_across_hosts(hosts: Hosts, tmp_path: Path, method: str) -> None:
    """With its own store, at MASTER_ADDR on the first host."""
    command = [
        str(BIN / "torchrun"), "--nnodes", "4", "--nproc-per-node", "1", "--master-addr", "node0",
        "--master-port", "29500",
    ]  # fmt: skip
    codes, written = finish(
        [
            hosts.start(
                host, [*command, "--node-rank", str(host), str(JOINED), method, "30",
                       str(tmp_path)],
                environment=ON_ONE_THREAD,
            )
            for host in range(4)
        ]
    )  # fmt: skip
    assert codes == [0, 0, 0, 0], written
    check(reports(written), written, "torch", range(4))


def mpirun(hosts: Hosts, *script: str) -> tuple[int, str]:
    """Started on the first host; what would be ssh enters the others' namespaces."""
    entries = [
        f'{name}) exec {shlex.join(hosts.within(host, ["sh", "-c"]))} "$*" ;;'
        for host, name in enumerate(hosts.names)
    ]
    agent = hosts.folder / "agent"
    agent.write_text("\n".join(["#!/bin/sh", "to=$1; shift", "case $to in", *entries, "esac", ""]))
    agent.chmod(0o755)
    started = hosts.start(
        0,
        [
            str(BIN / "mpirun"), "--prtemca", "plm_ssh_agent", str(agent), "--host",
            ",".join(hosts.names), "-n", "4", "-x", "OMP_NUM_THREADS", sys.executable, str(JOINED),
            *script,
        ],
        environment={
            **ON_ONE_THREAD, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
    )  # fmt: skip
    (code,), written = finish([started])
    return code, written


@pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="no mpirun beside this Python")
@pytest.mark.parametrize("method", ["pull_gossip", "ad_psgd", "all_reduce", "sync_server"])
def test_mpirun_trains_across_hosts(hosts: Hosts, tmp_path: Path, method: str) -> None:
    """One mpirun for all; its daemons and the workers find each other by host name."""
    code, written = mpirun(hosts, method, "30", str(tmp_path))
    assert code == 0, written
    check(reports(written), written, "mpi", range(4))


@pytest.mark.parametrize(
    ("method", "victim"), [("pull_gossip", 0), ("ad_psgd", 2), ("all_reduce", 3)]
)
def test_others_go_on_when_a_worker_is_killed(
    hosts: Hosts, tmp_path: Path, method: str, victim: int
) -> None:
    """By SIGKILL on its host; the first worker may be the one, for the store outlives it."""
    codes, written = finish(gossamer_run(hosts, method, "30", str(tmp_path), str(victim)))
    living = [rank for rank in range(4) if rank != victim]
    check(reports(written), written, "torch", living)
    assert f"worker {victim} was killed by SIGKILL" in written
    assert [codes[rank] for rank in living] == [0, 0, 0], written


def test_others_go_on_when_a_worker_fails(hosts: Hosts, tmp_path: Path) -> None:
    """A good-bye before the end is no end: nobody waits for answers that will not come."""
    codes, written = finish(gossamer_run(hosts, "sync_server", "30", str(tmp_path), "fails"))
    check(reports(written), written, "torch", [0, 1, 2])
    assert "worker 3 ended with exit code 1" in written
    assert codes[3] == 1


def test_others_go_on_when_a_cable_is_pulled(hosts: Hosts, tmp_path: Path) -> None:
    """No connection is closed; the launcher's silence tells, and its host counts as dead."""
    started = gossamer_run(hosts, "all_reduce", "60", str(tmp_path))
    until = time.monotonic() + LIMIT_S
    while not (tmp_path / "half-0").exists():
        assert time.monotonic() < until, "nobody came half way"
        time.sleep(0.02)
    with hosts.unplugged(3):
        codes, written = finish(started[:3])
    check(reports(written), written, "torch", [0, 1, 2])
    assert "node 3 gave no sign of life" in written
    assert codes[1:3] == [0, 0]


@pytest.mark.parametrize("method", ["ad_psgd", "pull_gossip", "push_gossip", "easgd"])
def test_a_cable_that_is_plugged_in_again_costs_nobody(
    hosts: Hosts, tmp_path: Path, method: str
) -> None:
    """Shorter than the launchers' patience: both sides train on, and merge when it is back."""
    started = gossamer_run(hosts, method, "120", str(tmp_path), pace_s=0.1)
    until = time.monotonic() + LIMIT_S
    while not (tmp_path / "half-0").exists():
        assert time.monotonic() < until, "nobody came half way"
        time.sleep(0.02)
    with hosts.unplugged(3):
        time.sleep(5.0)
    codes, written = finish(started)
    check(reports(written), written, "torch", [0, 1, 2, 3])
    assert codes == [0, 0, 0, 0]


def test_a_host_is_added_to_a_run_that_goes_on(hosts: Hosts, tmp_path: Path) -> None:
    """Its worker gets the model of the others, and ends with theirs."""
    begin = ["--elastic", "1:4", "-n", "1", "--rendezvous", "node0:29400", "--method", "ad_psgd"]
    attach = ["--attach", "node0:29400", "-n", "1"]
    started = [
        hosts.start(
            host, [str(BIN / "gossamer"), "run", *options, str(JOINED), "ad_psgd", "300",
                   str(tmp_path)],
            environment={**ON_ONE_THREAD, "PACE_S": "0.1"},
        )
        for host, options in enumerate([begin, attach])
    ]  # fmt: skip
    codes, written = finish(started)
    sums = {line.rpartition("sum=")[2] for line in written.splitlines() if "sum=" in line}
    assert codes == [0, 0], written
    assert len(sums) == 1
    assert "workers 1 have been attached" in written
