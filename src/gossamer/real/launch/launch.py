"""What a launcher is told to start, how many times, and how to watch it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.real.faults.fault_plan import FaultPlan
from gossamer.real.launch.attachment import Attachment
from gossamer.real.launch.console import OUTPUTS
from gossamer.real.launch.elastic import Elastic
from gossamer.real.launch.environment import TRANSPORTS
from gossamer.real.launch.hosts import Hosts


@dataclass(frozen=True)
class Launch:
    """What to start, how many times, and how to watch it."""

    command: Sequence[str]
    workers: int
    """The number of workers on this host."""
    hosts: Hosts = field(default_factory=Hosts)
    transport: str | None = None
    """shm or torch; None means the one that suits."""
    method: str | None = None
    seed: int | None = None
    folder: Path | None = None
    """The run folder, if there is one."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    output: str = "labelled"
    tolerates_deaths: bool = False
    """Whether the run succeeds after an unplanned death if workers survive."""
    deadline_s: float | None = None
    grace_s: float = 5.0
    """How many seconds a worker has after SIGINT, and again after SIGTERM."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """More variables for the workers."""
    under_mpirun: str = "python SCRIPT` instead of `gossamer run"
    """The command for mpirun, for a user who asks for the mpi transport."""
    elastic: Elastic | None = None
    """Whether workers may come during the run, and how many."""
    attach: Attachment | None = None
    """The running job to which these workers come."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigurationError(
                f"the number of workers must be at least 1, got {self.workers}"
            )
        if self.output not in OUTPUTS:
            raise unknown_name("output", self.output, OUTPUTS)
        if self.transport is not None and self.transport not in TRANSPORTS:
            raise unknown_name("transport", self.transport, TRANSPORTS)
        if self.transport == "mpi":
            raise ConfigurationError(
                "the mpi transport needs workers started by MPI; run "
                f"`mpirun -n {self.size} {self.under_mpirun}`"
            )
        if self.transport == "shm" and self.hosts.count > 1:
            raise ConfigurationError(
                f"the shm transport joins workers of one host, got {self.hosts.count} hosts; use "
                "--transport torch, or leave it out"
            )
        if self.deadline_s is not None and not 0 < self.deadline_s < float("inf"):
            raise ConfigurationError(f"--deadline must be above 0 seconds, got {self.deadline_s:g}")
        self.faults.check(self.size, is_elastic=self.elastic is not None)
        if self.elastic is not None and self.hosts.count > 1:
            raise ConfigurationError(
                f"an elastic run begins on one host, got --nnodes {self.hosts.count}; let the "
                "others add their workers with `gossamer run --attach`"
            )
        if self.elastic is not None and not self.workers <= self.elastic.most:
            raise ConfigurationError(
                f"--elastic {self.elastic.least}:{self.elastic.most} has no place for "
                f"-n {self.workers} workers"
            )

    @property
    def size(self) -> int:
        """The number of workers of all hosts together, or of places for them."""
        if self.attach is not None:
            return self.attach.size
        return self.workers * self.hosts.count if self.elastic is None else self.elastic.most

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of the workers of this host. Those whom `--arrive` names come later."""
        if self.attach is not None:
            return self.attach.ranks
        if self.elastic is not None:
            later = sorted(fault.worker for fault in self.faults.of("arrive"))
            return sorted({*range(self.workers), *later})
        return range(self.hosts.rank * self.workers, (self.hosts.rank + 1) * self.workers)

    @property
    def beginners(self) -> Sequence[int]:
        """The ranks of the workers that begin an elastic run together."""
        later = {fault.worker for fault in self.faults.of("arrive")}
        return [rank for rank in self.ranks if rank not in later]

    @property
    def chosen_transport(self) -> str:
        if self.transport is not None:
            return self.transport
        if self.attach is not None or (self.elastic is not None and self.hosts.port):
            return "torch"  # workers of other hosts may come
        # Only Linux has memory without a name, which no process can leave behind.
        return "shm" if self.hosts.count == 1 and hasattr(os, "memfd_create") else "torch"
