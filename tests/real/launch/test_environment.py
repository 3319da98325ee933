"""Who started this process: launchers are known by their variables; half of them is refused."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import ConfigurationError
from gossamer.real.launch import environment
from gossamer.real.launch.environment import (
    LAUNCHERS,
    TRANSPORTS,
    Environment,
    choose,
    connect,
    discover,
)
from gossamer.real.session import host_of
from gossamer.real.transports.slurm import first_host, slurm_address, slurm_local_size

GOSSAMER = {
    "GOSSAMER_RANK": "3", "GOSSAMER_SIZE": "4", "GOSSAMER_LOCAL_RANK": "1",
    "GOSSAMER_LOCAL_SIZE": "2", "GOSSAMER_STORE": "10.0.0.1:4000",
}  # fmt: skip
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "2",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}
SRUN = {
    "SLURM_PROCID": "4", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "3,2,1", "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NODELIST": "gpu[07-09]", "SLURM_LAUNCH_NODE_IPADDR": "10.1.1.1",
}  # fmt: skip
MEETS_AT = "gpu07:28638"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Environment("alone")),
        ({"GOSSAMER_METHOD": "easgd"}, Environment("alone", method="easgd")),
        (GOSSAMER, Environment("gossamer", 3, 4, 1, 2, "10.0.0.1:4000")),
        (
            GOSSAMER | {"GOSSAMER_SHM_FDS": "5,6", "GOSSAMER_TRANSPORT": "torch"},
            Environment(
                "gossamer", 3, 4, 1, 2, "10.0.0.1:4000", transport="torch", has_segments=True
            ),
        ),
        (TORCHRUN, Environment("torchrun", 5, 8, 1, 4, "head:29500")),
        (OPENMPI, Environment("openmpi", 2, 6, 0, 2)),
        (MPICH, Environment("mpich", 1, 3, 1, 3)),
        (SRUN, Environment("srun", 4, 6, 1, 2, MEETS_AT)),
        (SRUN | {"PMIX_RANK": "4"}, Environment("srun", 4, 6, 1, 2, MEETS_AT)),
        # One launcher inside another: the inner one counts.
        (SRUN | TORCHRUN, Environment("torchrun", 5, 8, 1, 4, "head:29500")),
        (SRUN | OPENMPI, Environment("openmpi", 2, 6, 0, 2)),
        (SRUN | TORCHRUN | GOSSAMER, Environment("gossamer", 3, 4, 1, 2, "10.0.0.1:4000")),
        # Exported by a batch script for everybody; the ranks are srun's.
        (
            SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "1", "WORLD_SIZE": "6"},
            Environment("srun", 4, 6, 1, 2, "head:1"),
        ),
        # A batch script itself, an interactive shell, a step of one task: nobody else is there.
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}, Environment("alone")),
        (SRUN | {"SLURM_STEP_ID": "4294967290"}, Environment("alone")),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Environment("alone")),
        ({"MASTER_ADDR": "head", "MASTER_PORT": "29500"}, Environment("alone")),
    ],
)
def test_a_launcher_is_known_by_its_variables(
    variables: dict[str, str], expected: Environment
) -> None:
    assert asdict(discover(variables)) == asdict(expected)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK and MASTER_ADDR and MASTER_PORT are not"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "TORCHELASTIC_RUN_ID is set but RANK and"),
        ({"GOSSAMER_RANK": "0"}, "GOSSAMER_RANK is set but GOSSAMER_SIZE and"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "but OMPI_COMM_WORLD_RANK is not"),
        ({"PMI_RANK": "2"}, "but PMI_SIZE is not; start the workers with `MPICH's mpiexec`"),
        ({"PMIX_RANK": "2"}, "nothing says how many processes there are"),
        (TORCHRUN | {"RANK": "8"}, "contradict each other: rank 8 of 8, local rank 1 of 4"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "contradict each other"),
        (TORCHRUN | {"RANK": "-1"}, "RANK must be a number of at least 0, got '-1'"),
        (TORCHRUN | {"WORLD_SIZE": ""}, "WORLD_SIZE must be a number of at least 0, got ''"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT must be a number"),
        (GOSSAMER | {"GOSSAMER_STORE": "here"}, "GOSSAMER_STORE must be HOST:PORT, got 'here'"),
        (GOSSAMER | {"GOSSAMER_SIZE": "1"}, "rank 3 of 1"),
        ({"GOSSAMER_TRANSPORT": "tcp"}, "unknown transport in GOSSAMER_TRANSPORT 'tcp'"),
    ],
)
def test_half_set_or_impossible_variables_are_one_sentence(
    variables: dict[str, str], sentence: str
) -> None:
    """Training alone without saying so would be worse than any error."""
    with pytest.raises(ConfigurationError) as refused:
        discover(variables)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


NAMES = sorted({*GOSSAMER, *TORCHRUN, *OPENMPI, *MPICH, *SRUN, "GOSSAMER_TRANSPORT"})
VALUES = st.sampled_from(["", "0", "1", "2", "-1", "x", "host:1", "4(x2)", "n[1-2]", "99999999999"])


@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_whatever_is_set_the_answer_is_consistent_or_refused(
    variables: dict[str, str],
) -> None:
    try:
        here = discover(variables)
    except ConfigurationError:
        return
    assert 0 <= here.rank < here.size
    assert 0 <= here.local_rank < here.local_size <= here.size
    assert here.kind in (*LAUNCHERS, "alone")


# ---------------------------------------------------------------------- which transport


@pytest.mark.parametrize(
    ("variables", "name", "has_mpi4py", "expected"),
    [
        (GOSSAMER, None, True, "torch"),
        (GOSSAMER | {"GOSSAMER_SHM_FDS": "5,6"}, None, True, "shm"),
        (GOSSAMER | {"GOSSAMER_SHM_FDS": "5,6"}, "torch", True, "torch"),
        (GOSSAMER | {"GOSSAMER_TRANSPORT": "torch", "GOSSAMER_SHM_FDS": "5"}, None, True, "torch"),
        (GOSSAMER | {"GOSSAMER_TRANSPORT": "torch", "GOSSAMER_SHM_FDS": "5"}, "shm", True, "shm"),
        (TORCHRUN, None, True, "torch"),
        (OPENMPI, None, True, "mpi"),
        (MPICH, None, True, "mpi"),
        (SRUN, None, True, "mpi"),
        (SRUN, None, False, "torch"),
        (SRUN, "torch", True, "torch"),
        (OPENMPI | {"MASTER_ADDR": "h", "MASTER_PORT": "1"}, "torch", False, "torch"),
        (TORCHRUN, "shm", True, "the shm transport needs shared memory from `gossamer run`"),
        (TORCHRUN, "mpi", True, "needs workers started by mpirun or srun, but torchrun started"),
        (GOSSAMER, "mpi", True, "run `mpirun -n 4 python SCRIPT`"),
        (OPENMPI, None, False, "but mpi4py is not installed; run `pip install mpi4py`"),
        (OPENMPI, "torch", True, "needs an address where the workers meet"),
    ],
)
def test_the_transport_follows_from_the_launcher_or_is_refused(
    variables: dict[str, str], name: str | None, has_mpi4py: bool, expected: str
) -> None:
    """What was asked for wins; what cannot work says why, and what to do."""
    here = discover(variables)
    if expected in TRANSPORTS:
        assert choose(here, name, has_mpi4py=has_mpi4py) == expected
        return
    with pytest.raises(ConfigurationError) as refused:
        choose(here, name, has_mpi4py=has_mpi4py)
    assert expected in str(refused.value)


def test_one_worker_needs_no_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under a launcher; a name that does not exist is refused even so."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert connect() is None
    assert connect("shm") is None
    for name, text in (("RANK", "0"), ("SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "1")):
        monkeypatch.setenv(f"GOSSAMER_{name}", text)
    monkeypatch.setenv("GOSSAMER_STORE", "127.0.0.1:1")
    assert connect() is None
    with pytest.raises(ConfigurationError, match="unknown transport 'tcp'"):
        connect("tcp")


def test_who_started_the_workers_is_seen_after_they_have_connected_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over torch, under srun: it may deal ranks out over the hosts in turn, so that torchrun's way
    of telling hosts apart by ranks would be wrong."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    monkeypatch.setattr(environment, "_joined", [])
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    step = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, text in (SRUN | step | meets).items():
        monkeypatch.setenv(name, text)
    before = dict(os.environ)
    transport = connect("torch")
    assert transport is not None
    assert (transport.rank, transport.size) == (0, 6)
    assert dict(os.environ) == before
    assert discover().kind == "srun"
    assert host_of(discover()) == socket.gethostname()
    transport.close()


# ---------------------------------------------------------------------- SLURM's lists


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("node3", "node3"), ("a1,b2", "a1"), ("node[003-007,9],gpu1", "node003"),
        ("n[12]", "n12"), ("rack[1-2]-ib,x", "rack1-ib"), ("", None),
    ],
)  # fmt: skip
def test_the_first_host_of_a_list(listed: str, expected: str | None) -> None:
    assert first_host(listed) == expected


@pytest.mark.parametrize(
    ("listed", "node", "expected"),
    [("4", "0", 4), ("4(x2),3", "1", 4), ("4(x2),3", "2", 3), ("4(x2),3", "3", 9), ("?", "0", 9)],
)
def test_tasks_on_this_host(listed: str, node: str, expected: int) -> None:
    """What cannot be read leaves the default."""
    found = {"SLURM_TASKS_PER_NODE": listed, "SLURM_NODEID": node}
    assert slurm_local_size(found, 9) == expected


@given(st.integers(0, 10**9), st.integers(0, 1000))
def test_all_tasks_of_a_step_derive_the_same_address(job: int, step: int) -> None:
    """Whatever their own rank; the port is a user's one, below those the system gives away."""
    shared = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_NODELIST": "a,b"}
    addresses = {slurm_address(shared | {"SLURM_PROCID": str(rank)}) for rank in range(3)}
    assert len(addresses) == 1
    host, _, port = str(addresses.pop()).rpartition(":")
    assert host == "a"
    assert 1024 <= int(port) < 32768
