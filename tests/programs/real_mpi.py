"""Commands under mpirun and torchrun: their processes end with the test, whatever happens."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fork_server import popen
from gossamer.config.cluster import Cluster
from gossamer.config.settings import make_settings
from gossamer.real.train.progress import TrainingProgress
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.worker_log import FileEntries
from programs import LIMIT_S

MPIRUN = Path(sys.executable).with_name("mpirun")
needs_mpirun = pytest.mark.skipif(
    not MPIRUN.exists() or importlib.util.find_spec("mpi4py") is None,
    reason="mpirun and mpi4py are not installed beside this Python",
)
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def start(command: Sequence[str], variables: Mapping[str, str] = {}) -> subprocess.Popen[str]:
    return popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, **_VARIABLES, **variables},
    )  # fmt: skip


def finish(running: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code and what it wrote; nothing of it is left."""
    try:
        out, err = running.communicate(timeout=LIMIT_S)
    finally:
        end_session(running.pid)
    return running.returncode, out, err


def end_session(leader: int) -> None:
    """End what a command has left: mpirun and torchrun give processes groups of their own."""
    for pid in session_of(leader):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass  # ended by itself meanwhile


def session_of(leader: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
            except OSError:
                pass  # ended meanwhile
    return found


def under_mpirun(size: int, *arguments: str) -> list[str]:
    return [str(MPIRUN), "-n", str(size), sys.executable, *arguments]


def under_torchrun(size: int, *arguments: str) -> list[str]:
    runner = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    return [*runner, "--standalone", *arguments]


def train_under_mpirun(size: int, method: str, folder: Any, **choices: Any) -> dict[str, Any]:
    """The program of a worker, started by mpirun; the summary of what the workers wrote."""
    settings = make_settings("digits-mlp", method, Cluster(workers=size), **choices)
    job = TrainRequest(settings, folder)
    variables = {"GOSSAMER_JOB": job.to_json()}
    command = under_mpirun(size, "-m", "gossamer.real.train.worker_main")
    status, out, err = finish(start(command, variables))
    assert status == 0, (out, err)
    follower = TrainingProgress(folder, [FileEntries(folder, rank) for rank in range(size)])
    follower.catch_up()
    result = follower.result(settings, status)
    assert result.parameters is not None
    return {**result.summary, "parameters": result.parameters.tolist()}


def last_json(text: str) -> dict[str, Any]:
    return json.loads(text.strip().splitlines()[-1])
