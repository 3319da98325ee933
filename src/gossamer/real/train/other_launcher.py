"""A job that another launcher has started, as one of its workers sees it.

torchrun, mpirun, srun and `gossamer run` start the same command everywhere. Worker 0 decides what
the run is and where it is kept, and sends that to the others, its followers, through the store.
When worker 0 refuses something, all refuse it: nobody is left waiting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigurationError
from gossamer.real.faults.fault_plan import FAULTS_VARIABLE, FaultPlan
from gossamer.real.launch.console import say
from gossamer.real.launch.environment import Environment, connect, discover
from gossamer.real.session import heard
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.worker_log import WorkerLog
from gossamer.real.train.worker_main import run_worker
from gossamer.real.transports.transport import Store, Transport

_LOOK_S = 0.01
_FILES_S = 5.0
"""How long a shared file system may take to show what another host has written."""
_FAREWELL_S = 5.0
_REFUSALS = (ConfigurationError, OSError)
"""The errors that keep worker 0 from beginning: settings, or a disk."""


class Refused(ConfigurationError):
    """Raised in another worker when worker 0 has refused the job; worker 0 prints why."""


def launcher_job() -> Environment | None:
    """The job of another launcher that this process is a worker of."""
    here = discover()
    return here if here.size > 1 else None


def is_follower() -> bool:
    """Whether this process is a worker of such a job, but not worker 0."""
    here = launcher_job()
    return here is not None and here.rank != 0


class JobPeers:
    """The workers of such a job, as one of them reaches them through the store."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store = store
        self.rank = rank
        self._size = size

    # ------------------------------------------------------------------ worker 0

    def send_job(self, prepare: Callable[[], TrainRequest]) -> TrainRequest:
        """Called by worker 0: tell the others what the run is. All workers write their checkpoints
        into one folder, so all must see it."""
        with self._refusing():
            request = prepare()
        if request.checkpoint_every is None and request.checkpoint is None:
            self._tell("job", {"job": request.to_json(), "mark": None})
            return request
        mark = request.place / f".shared-{secrets.token_hex(8)}"
        with self._refusing():
            mark.touch()
        try:
            self._tell("job", {"job": request.to_json(), "mark": mark.name})
            refusal = self._first_objection()
        finally:
            mark.unlink()
        self._tell("verdict", {"refused": refusal})
        if refusal is not None:
            self._wait_until_all_have_heard()
            raise ConfigurationError(refusal)
        return request

    @contextlib.contextmanager
    def _refusing(self) -> Generator[None]:
        try:
            yield
        except _REFUSALS as error:
            self.refuse(error)
            raise

    def refuse(self, error: Exception) -> None:
        self._tell("job", {"refused": str(error)})
        self._wait_until_all_have_heard()

    def _first_objection(self) -> str | None:
        for other in range(1, self._size):
            objection = self._hear(f"objection/{other}", f"worker {other}")["objection"]
            if objection is not None:
                return objection
        return None

    def _wait_until_all_have_heard(self) -> None:
        """Worker 0 may keep the store, so it must not leave earlier."""
        until = time.monotonic() + _FAREWELL_S
        while self.store.add("heard", 0) < self._size - 1 and time.monotonic() < until:
            time.sleep(_LOOK_S)

    # ------------------------------------------------------------------ the others

    def receive_job(self, folder: Path, data: Path | None = None) -> TrainRequest:
        """Called by the other workers. They write into worker 0's folder if it is shared, else into
        `folder`; `data` is where the task's files are on this host, if elsewhere."""
        told = self._hear("job", "worker 0")
        self._obey(told)
        request = TrainRequest.from_json(told["job"], data)
        if told["mark"] is None:
            return dataclasses.replace(request, folder=folder)
        objection = objection_to(request.place, told["mark"], self.rank)
        self._tell(f"objection/{self.rank}", {"objection": objection})
        self._obey(self._hear("verdict", "worker 0"))
        return request

    def _obey(self, told: dict[str, Any]) -> None:
        refusal = told.get("refused")
        if refusal is not None:
            self.store.add("heard", 1)
            raise Refused(refusal)

    # ------------------------------------------------------------------ both

    def leave(self, living: int) -> None:
        """Leave after reading everything in the store. Worker 0, which may keep the store, stays
        until the other living workers have read it, too."""
        there = self.store.add("log/read", 1)
        until = time.monotonic() + _FAREWELL_S
        while self.rank == 0 and there < living and time.monotonic() < until:
            time.sleep(_LOOK_S)
            there = self.store.add("log/read", 0)

    def _tell(self, what: str, told: dict[str, Any]) -> None:
        self.store.agree(f"peers/{what}", json.dumps(told))

    def _hear(self, what: str, whose: str) -> dict[str, Any]:
        return json.loads(heard(self.store, f"peers/{what}", whose, "what it knows of the run"))


def objection_to(folder: Path, mark: str, rank: int) -> str | None:
    """Why a worker cannot keep its checkpoints in the folder that worker 0 has marked."""
    until = time.monotonic() + _FILES_S
    while not (folder / mark).exists():
        if time.monotonic() > until:
            return _objection(rank, "does not see", folder)
        time.sleep(_LOOK_S)
    own = folder / f"{mark}-{rank}"
    try:
        own.touch()
        own.unlink()
    except OSError:
        return _objection(rank, "cannot write into", folder)
    return None


def _objection(rank: int, what: str, folder: Path) -> str:
    return (
        f"worker {rank} on {socket.gethostname()} {what} {folder}, where all workers keep their "
        "checkpoints; use a folder that all hosts share"
    )


# ---------------------------------------------------------------------- doors


def meet(name: str | None, faults: FaultPlan | None = None) -> tuple[JobPeers, Transport]:
    """Connect with the other workers of this process's job."""
    if faults is not None and faults != FaultPlan():
        os.environ[FAULTS_VARIABLE] = faults.to_json()
    transport = connect(name)
    assert transport is not None, "a job of one worker is nobody's"
    return JobPeers(transport.store, transport.rank, transport.size), transport


def run_as_follower(name: str | None, faults: FaultPlan, data: Path | None) -> int:
    """Be a worker other than 0. It is silent unless it fails: then it prints why, because worker 0
    may have died or may be ended by the launcher. Returns the exit code."""
    peers, transport = meet(name, faults)
    with tempfile.TemporaryDirectory(prefix="gossamer-") as own:
        try:
            request = peers.receive_job(Path(own), data)
        except Refused:
            # Worker 0 says why, and its exit code is the job's. A launcher that sees another
            # failure might end worker 0 before it has spoken.
            return 0
        log = WorkerLog(request.place, peers.rank, peers.store)
        status = run_worker(request, transport, log, say)
        if status == 0:
            peers.leave(0)
        return status


@contextlib.contextmanager
def refuse_everywhere(name: str | None) -> Generator[None]:
    """Wraps checks that only worker 0 makes while the others wait for the job."""
    try:
        yield
    except _REFUSALS as error:
        if launcher_job() is not None:
            meet(name)[0].refuse(error)
        raise
