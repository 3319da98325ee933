"""Which launcher started this process, and how the process reaches the other workers.

Nothing has to be configured: `gossamer run`, torchrun, mpirun and srun each set variables in the
environment of the processes that they start. The rank, the number of workers and the transport
follow from these. A process that none of them started trains alone, like plain PyTorch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.real.faults.fault_plan import own_fault_plan
from gossamer.real.faults.shaped_links import ShapedTransport
from gossamer.real.transports.slurm import slurm_address, slurm_local_size, slurm_step, slurm_tasks
from gossamer.real.transports.transport import Transport

TRANSPORTS = ("shm", "torch", "mpi")
LAUNCHERS = {
    "gossamer": "gossamer run",
    "torchrun": "torchrun",
    "openmpi": "Open MPI's mpirun",
    "mpich": "MPICH's mpiexec",
    "srun": "srun",
}
_MPI = ("openmpi", "mpich")
_DEFAULT_WORKERS = 2
_joined: list[str] = []
"""The transport of this process, if a process can connect by it only once."""


@dataclass(frozen=True)
class Environment:
    """What the variables of a launcher say about this process."""

    kind: str
    """gossamer, torchrun, openmpi, mpich, srun or alone."""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str | None = None
    """HOST:PORT where the workers meet, if the launcher names it."""
    transport: str | None = None
    """The value of GOSSAMER_TRANSPORT."""
    method: str | None = None
    has_segments: bool = False
    """Whether our launcher passed shared memory on."""


def discover(variables: Mapping[str, str] | None = None) -> Environment:
    """Recognise the launcher. If one launcher started another, the inner one counts."""
    found = os.environ if variables is None else variables
    for recognise in (_gossamer, _torchrun, _mpi, _srun, _half_set):
        here = recognise(found)
        if here is not None:
            return _checked(here, found)
    return Environment("alone", transport=_transport(found), method=found.get("GOSSAMER_METHOD"))


def rank() -> int:
    """The rank that `gossamer.join` will have in this process: for what comes before it, such as
    the choice of a device or a file. Alone it is 0."""
    return discover().rank


def size() -> int:
    """How many workers the launcher has started; alone it is 1."""
    return discover().size


def number_of_workers(asked: int | None, here: Environment | None) -> int:
    """Return the number that was asked for, that the launcher `here` has started, or two."""
    if here is None:
        if asked is not None and asked < 1:
            raise ConfigurationError(f"-n must be at least 1, got {asked}")
        return _DEFAULT_WORKERS if asked is None else asked
    if asked not in (None, here.size):
        raise ConfigurationError(
            f"{LAUNCHERS[here.kind]} has started {here.size} workers, got -n {asked}; leave it out"
        )
    return here.size


def connect(name: str | None = None) -> Transport | None:
    """Connect to the other workers; return None if there are none."""
    here = discover()
    if name is not None and name not in TRANSPORTS:
        raise unknown_name("transport", name, TRANSPORTS)
    if here.size == 1:
        return None
    chosen = choose(here, name, has_mpi4py=importlib.util.find_spec("mpi4py") is not None)
    transport = _connected(chosen, here)
    plan = own_fault_plan()
    return ShapedTransport(transport, plan) if plan.shapes_links else transport


def _connected(chosen: str, here: Environment) -> Transport:
    if chosen == "mpi":
        from gossamer.real.transports.mpi import MpiTransport

        return MpiTransport.from_environment()
    if _joined:
        raise ConfigurationError(
            f"this process has joined the others before, and over {_joined[0]} it can do so once; "
            "do all training in one `with gossamer.join(...)`, or start a program for each part"
        )
    if chosen == "shm":
        from gossamer.real.transports.shm import ShmTransport

        transport = ShmTransport.from_environment()
    else:
        from gossamer.real.transports.torch import TorchTransport

        # The environment itself stays unchanged: it says which launcher started this process.
        transport = TorchTransport.from_environment({**os.environ, **_names_of_torch(here)})
    _joined.append(chosen)
    return transport


def choose(here: Environment, name: str | None, *, has_mpi4py: bool) -> str:
    """Return the transport that was asked for, or one that suits; refuse one that cannot work."""
    asked = name or here.transport
    started_by = LAUNCHERS[here.kind]
    if asked is None:
        if here.kind in _MPI or (here.kind == "srun" and has_mpi4py):
            asked = "mpi"
        else:
            asked = "shm" if here.has_segments else "torch"
    if asked == "shm" and not here.has_segments:
        raise ConfigurationError(
            f"the shm transport needs shared memory from `gossamer run` on one host, but "
            f"{started_by} started these {here.size} workers without it; start them with "
            f"`gossamer run --transport shm`, or leave the transport out"
        )
    if asked == "mpi" and here.kind in ("gossamer", "torchrun"):
        raise ConfigurationError(
            f"the mpi transport needs workers started by mpirun or srun, but {started_by} started "
            f"these; run `mpirun -n {here.size} python SCRIPT`, or leave the transport out"
        )
    if asked == "mpi" and not has_mpi4py:
        raise ConfigurationError(
            f"{started_by} started these {here.size} workers, but mpi4py is not installed; "
            "run `pip install mpi4py`, or use `gossamer run` or torchrun"
        )
    if asked == "torch" and here.address is None:
        raise ConfigurationError(
            f"the torch transport needs an address where the workers meet, and {started_by} gives "
            "none; set MASTER_ADDR and MASTER_PORT for all of them, or use `gossamer run` or "
            "torchrun"
        )
    return asked


def _names_of_torch(here: Environment) -> dict[str, str]:
    """Return torch's own variables, for launchers that do not set them."""
    if here.kind in ("gossamer", "torchrun") or here.address is None:
        return {}
    host, _, port = here.address.rpartition(":")
    return {
        "RANK": str(here.rank), "WORLD_SIZE": str(here.size), "MASTER_ADDR": host,
        "MASTER_PORT": port, "LOCAL_RANK": str(here.local_rank),
        "LOCAL_WORLD_SIZE": str(here.local_size),
    }  # fmt: skip


# ---------------------------------------------------------------------- each launcher's variables


def _gossamer(found: Mapping[str, str]) -> Environment | None:
    if "GOSSAMER_RANK" not in found and "GOSSAMER_SIZE" not in found:
        return None
    names = (
        "GOSSAMER_RANK", "GOSSAMER_SIZE", "GOSSAMER_LOCAL_RANK", "GOSSAMER_LOCAL_SIZE",
        "GOSSAMER_STORE",
    )  # fmt: skip
    _all_of(found, names, "gossamer run")
    rank, size, local_rank, local_size = (_count(found, name) for name in names[:4])
    return Environment(
        "gossamer", rank, size, local_rank, local_size,
        address=_host_and_port(found["GOSSAMER_STORE"], "GOSSAMER_STORE"),
        has_segments="GOSSAMER_SHM_FDS" in found,
    )  # fmt: skip


_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _torchrun(found: Mapping[str, str]) -> Environment | None:
    """torchrun, or the same variables set by hand or by another launcher."""
    if "TORCHELASTIC_RUN_ID" in found:
        _all_of(found, _OF_TORCHRUN, "torchrun")
    elif not all(name in found for name in _OF_TORCHRUN):
        return None
    rank, size = _count(found, "RANK"), _count(found, "WORLD_SIZE")
    # Set by hand, the local ones may be missing; then there is one process on each host.
    local_rank = _count(found, "LOCAL_RANK", 0)
    local_size = _count(found, "LOCAL_WORLD_SIZE", local_rank + 1)
    address = f"{found['MASTER_ADDR']}:{_count(found, 'MASTER_PORT')}"
    return Environment("torchrun", rank, size, local_rank, local_size, address)


_OF_MPI = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}  # fmt: skip


def _mpi(found: Mapping[str, str]) -> Environment | None:
    """Open MPI or MPICH. Each says a rank and a size, and perhaps the same two of this host."""
    for kind, names in _OF_MPI.items():
        if names[0] in found or names[1] in found:
            _all_of(found, names[:2], LAUNCHERS[kind])
            local_rank = _count(found, names[2], 0)
            local_size = _count(found, names[3], local_rank + 1)
            rank, size = _count(found, names[0]), _count(found, names[1])
            return Environment(kind, rank, size, local_rank, local_size, _master(found))
    return None


def _srun(found: Mapping[str, str]) -> Environment | None:
    """A step of srun. A batch script itself has a rank too, but it is no worker."""
    if slurm_step(found) is None or "SLURM_PROCID" not in found:
        if "PMIX_RANK" in found:
            raise ConfigurationError(
                "PMIX_RANK is set, but nothing says how many processes there are; start the "
                "workers with mpirun, srun, torchrun or `gossamer run`"
            )
        return None
    size = slurm_tasks(found)
    if size is None or size == 1:
        return None
    local_rank = _count(found, "SLURM_LOCALID", 0)
    return Environment(
        "srun", _count(found, "SLURM_PROCID"), size, local_rank,
        slurm_local_size(found, local_rank + 1), _master(found) or slurm_address(found),
    )  # fmt: skip


def _half_set(found: Mapping[str, str]) -> None:
    """Refuse a rank without a number of workers, or the reverse, which would train alone."""
    if "RANK" in found or "WORLD_SIZE" in found:
        _all_of(found, _OF_TORCHRUN, "torchrun")


# ---------------------------------------------------------------------- reading them


def _all_of(found: Mapping[str, str], names: tuple[str, ...], launcher: str) -> None:
    missing = [name for name in names if name not in found]
    if missing:
        present = next((name for name in names if name in found), "TORCHELASTIC_RUN_ID")
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigurationError(
            f"{present} is set but {' and '.join(missing)} {verb} not; start the workers "
            f"with `{launcher}`, or unset {present} to train alone"
        )


def _count(found: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = found.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdecimal():
        raise ConfigurationError(
            f"{name} must be a number of at least 0, got {text!r}; let the launcher set it"
        )
    return int(text)


def _checked(here: Environment, found: Mapping[str, str]) -> Environment:
    """Refuse ranks that are not below the sizes, and hosts with more workers than there are."""
    fits = 0 <= here.rank < here.size and 0 <= here.local_rank < here.local_size <= here.size
    if not fits:
        raise ConfigurationError(
            f"the variables of {LAUNCHERS[here.kind]} contradict each other: rank {here.rank} of "
            f"{here.size}, local rank {here.local_rank} of {here.local_size}; start the workers "
            "anew, without setting them by hand"
        )
    return replace(here, transport=_transport(found), method=found.get("GOSSAMER_METHOD"))


def _transport(found: Mapping[str, str]) -> str | None:
    name = found.get("GOSSAMER_TRANSPORT") or None
    if name is not None and name not in TRANSPORTS:
        raise unknown_name("transport in GOSSAMER_TRANSPORT", name, TRANSPORTS)
    return name


def _master(found: Mapping[str, str]) -> str | None:
    if "MASTER_ADDR" not in found or "MASTER_PORT" not in found:
        return None
    return f"{found['MASTER_ADDR']}:{_count(found, 'MASTER_PORT')}"


def _host_and_port(text: str, where: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"{where} must be HOST:PORT, got {text!r}")
    return text
