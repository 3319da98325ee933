"""Where workers over torch meet: who may come, who is missed, and whom the store belongs to."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest
import torch
from torch import distributed

from gossamer.errors import ConfigurationError, PeerLost
from gossamer.real.transports.conformance.tools import FrameRecorder
from gossamer.real.transports.death_notices import StartupCheck, tell_dead
from gossamer.real.transports.store import TcpStore, serve
from gossamer.real.transports.torch import TorchTransport
from gossamer.real.transports.torch.rendezvous import Meeting, meet
from gossamer.real.transports.transport import StopToken, Window
from launching import free_port

SECRET = b"a secret of the tests alone"


def by_hand(rank: int, port: int) -> Meeting:
    """What variables set without a launcher say."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Meeting.from_environment({"RANK": str(rank), "WORLD_SIZE": "2", **place})


def as_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)


def test_worker_0_does_not_join_a_strangers_store() -> None:
    """A taken port is somebody else's, and is named with what to do."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf":{port} .* MASTER_PORT to a free port"):
            by_hand(0, port).connect()


def test_worker_0_shares_the_port_with_its_programs_own_group() -> None:
    """`init_process_group` keeps a store there, which is this process's, too."""
    port = free_port()
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    )
    try:
        meeting = by_hand(0, port)
        store = meeting.enter(meeting.connect())
        assert store.agree("fact", "ours") == "ours"
        assert meeting.store(meeting.connect_again()).get("fact") == "ours"
    finally:
        distributed.destroy_process_group()


def test_a_second_worker_of_the_same_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another run's; one and the same process may come again."""
    meeting = by_hand(0, free_port())
    engine = meeting.connect()
    meeting.enter(engine)
    meeting.enter(engine)
    as_another_process(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"as worker 0 before.*MASTER_PORT"):
        meeting.enter(engine)


def step_of(job: int, step: int, rank: int) -> Meeting:
    """A task of a step, as srun and the place made of the step's numbers have it."""
    slurm = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_NODELIST": "a,b"}
    port = 20_000 + (7 * job + step) % 12_000
    place = {"MASTER_ADDR": "a", "MASTER_PORT": str(port)}
    return Meeting.from_environment({"RANK": str(rank), "WORLD_SIZE": "4"} | slurm | place)


def test_steps_of_slurm_whose_ports_coincide_share_no_facts() -> None:
    """Their other tasks may reach one store; all tasks of one step agree about where in it."""
    first, second = step_of(100, 7, 1), step_of(101, 0, 1)
    assert (first.host, first.port) == (second.host, second.port)
    assert first.prefix != second.prefix
    assert step_of(100, 7, 2).prefix == first.prefix


def test_a_port_given_by_hand_makes_steps_of_slurm_one_run() -> None:
    """One step for each host is a way to start workers, too."""
    place = {"MASTER_ADDR": "a", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    slurm = {"SLURM_JOB_ID": "5", "SLURM_NODELIST": "a,b"}
    meetings = [
        Meeting.from_environment(place | slurm | {"RANK": text, "SLURM_STEP_ID": text})
        for text in ("0", "1")
    ]
    assert len({meeting.prefix for meeting in meetings}) == 1


def open_transport(meeting: Meeting) -> None:
    windows = {rank: Window(4, torch.float32, rank) for rank in range(meeting.size)}
    transport = TorchTransport(meeting, "messages")
    transport.open(windows, {0: torch.zeros(4)}, FrameRecorder(), StopToken())


def only_meet(meeting: Meeting) -> None:
    engine = meeting.connect()
    meet(meeting, StartupCheck(StopToken(), TcpStore(engine)).check)


@pytest.mark.parametrize("come", [open_transport, only_meet])
def test_a_worker_that_died_before_all_had_met_is_named_at_once(
    come: Callable[[Meeting], None],
) -> None:
    """The others wait for it in vain; of several the first is the cause."""
    kept, told = serve(SECRET)
    tell_dead(told, 2, "ended with exit code 1")
    tell_dead(told, 1, "was killed by SIGTERM")
    meeting = Meeting(0, 3, "127.0.0.1", kept.port, has_notices=True, secret=SECRET)
    with pytest.raises(PeerLost, match=r"worker 2 is lost: ended with exit code 1, before"):
        come(meeting)


def test_who_came_and_died_before_all_were_connected_is_named_at_once() -> None:
    """All have come, but connections are made with the one that is not there any more."""
    kept, told = serve(SECRET)
    meeting = Meeting(0, 2, "127.0.0.1", kept.port, has_notices=True, secret=SECRET)
    meeting.store(meeting.connect()).add("arrived", 1)
    tell_dead(told, 1, "was killed by SIGKILL")
    with pytest.raises(PeerLost, match="worker 1 is lost: was killed by SIGKILL"):
        only_meet(meeting)
