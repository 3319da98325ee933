"""Launchers of several hosts: they meet, make one run, and tell each other of deaths."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.errors import ConfigurationError, Error, Late
from gossamer.real.launch.hosts import HostMeeting, Hosts
from gossamer.real.launch.launch import Launch
from gossamer.real.launch.launcher import Launcher
from launching import command, free_port, pids, script, wait_until


def on_hosts(launches: Sequence[Launch]) -> list[int | BaseException]:
    """Each launch in a thread of its own, as if on a host of its own."""
    results: list[int | BaseException] = [0] * len(launches)

    def run(number: int) -> None:
        try:
            results[number] = Launcher(launches[number]).run()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(launches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def hosts(count: int, patience_s: float = 100.0) -> list[Hosts]:
    port = free_port()
    return [Hosts(count, rank, "127.0.0.1", port, patience_s) for rank in range(count)]


def test_two_launchers_make_one_run(tmp_path: Path) -> None:
    """Of the real command, each with two workers; ranks go on from host to host."""
    worker = script(tmp_path, "print(rank, os.environ['GOSSAMER_SIZE'], sys.argv[1:])")
    common = ("-n", "2", "--nnodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}")
    with (
        command(*common, "--node-rank", "1", *worker, "-n", "9") as second,
        command(*common, "--node-rank", "0", *worker, "-n", "9") as first,
    ):
        said = [process.communicate(timeout=300)[0] for process in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0)
    assert sorted("".join(said).splitlines()) == [f"[{r}] {r} 4 ['-n', '9']" for r in range(4)]


def test_a_death_on_one_host_is_told_to_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the store at the rendezvous, and the first node hears of the other's failure."""
    worker = script(tmp_path, "sys.exit(5 if rank == 1 else 0)")
    launches = [Launch(worker, 1, hosts=host, transport="torch") for host in hosts(2)]
    assert on_hosts(launches) == [1, 5]
    assert "node 1 ended with exit code 5" in capsys.readouterr().err
    assert pids(tmp_path) == []


def test_who_does_not_come_is_named() -> None:
    """By those who did, after their patience; and who finds nobody says so."""
    first, _, third = hosts(3)
    early = HostMeeting(replace(first, patience_s=0.2), 1)
    came: list[int | BaseException] = []
    waiting = threading.Thread(
        target=lambda: came.extend(on_hosts([Launch(["true"], 1, hosts=third)]))
    )
    waiting.start()
    wait_until(lambda: early.store.get("launchers/2") is not None)
    with pytest.raises(Late, match=r"node 1 of 3 did not come to 127\.0\.0\.1:"):
        early.wait_for_all()
    waiting.join()
    assert "node 0 waits no longer" in str(came[0])
    early.close()
    alone = on_hosts([Launch(["true"], 1, hosts=hosts(3, patience_s=0.2)[2])])
    assert "node 0 did not open 127.0.0.1:" in str(alone[0])


def test_another_program_at_the_rendezvous_is_not_waited_for() -> None:
    """It takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = int(listening.getsockname()[1])
        with pytest.raises(ConfigurationError, match=f"at 127.0.0.1:{port} that is not node 0"):
            HostMeeting(Hosts(2, 1, "127.0.0.1", port, patience_s=0.5), 1)


def given_up(first: Hosts) -> HostMeeting:
    """Node 0, after it has waited in vain; its store is still there, as that of a third host's
    launcher would be."""
    meeting = HostMeeting(replace(first, patience_s=0.2), 1)
    with pytest.raises(Late, match="did not come"):
        meeting.wait_for_all()
    return meeting


def test_nobody_starts_with_a_node_that_has_given_up() -> None:
    """A latecomer finds all names entered, and is refused nevertheless."""
    first, second = hosts(2)
    early = given_up(first)
    with pytest.raises(Error, match="the hosts did not come together: node 0 waits no longer"):
        HostMeeting(second, 1).wait_for_all()
    assert early.close() is None


def test_nodes_that_contradict_each_other_are_refused() -> None:
    """Another number of workers, or a rank that is taken."""
    first, second, _ = hosts(3)
    early = given_up(first)
    with pytest.raises(ConfigurationError, match="all nodes must have the same shape"):
        HostMeeting(second, 2).wait_for_all()
    with pytest.raises(Error, match="node 0 waits no longer"):
        HostMeeting(second, 1).wait_for_all()
    with pytest.raises(ConfigurationError, match="--node-rank 1 is taken by"):
        HostMeeting(second, 1).wait_for_all()
    early.close()
