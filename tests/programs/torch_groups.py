"""Runs groups of processes over Gloo, one scenario list after another; prints JSON.

A program of its own, so that torch is imported once and every process is a fork of it. The forks of
the longest lists, and those who survive a death, end as any Python program does, so that a thread
or a destructor that hangs is seen. It takes a fifth of a second of each, so the others just leave.

    python tests/programs/torch_groups.py '[[3, ["scenario"], {"GOSSAMER_REDUCTION": "messages"}]]'

The answer is one object per group: how each process ended, and what it wrote.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch_deaths  # noqa: F401  # fills the table
from gossamer.real.transports.conformance.group import store_apart, watch
from gossamer.real.transports.conformance.tools import run_laws
from gossamer.real.transports.torch import TorchTransport
from programs import GROUP_LIMIT_S, tell_groups


def fork(work: Callable[[], None]) -> int:
    """A process that does only this, and then ends in the ordinary way."""
    pid = os.fork()
    if pid == 0:
        work()
        sys.exit(0)
    return pid


def be_worker(variables: dict[str, str], names: list[str], log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    run_laws(TorchTransport.from_environment(), names)
    if len(names) == 1 and "noticed" not in names[0]:
        sys.stdout.flush()
        os._exit(0)


def run(size: int, names: list[str], extra: dict[str, str], folder: Path) -> dict[str, object]:
    """Start a store and the processes, and kill what is left at the limit."""
    with store_apart() as port:
        logs = [folder / f"{rank}.txt" for rank in range(size)]
        pids: dict[int, int] = {}
        for rank in range(size):
            variables = {
                "GOSSAMER_RANK": str(rank),
                "GOSSAMER_SIZE": str(size),
                "GOSSAMER_STORE": f"127.0.0.1:{port}",
                **extra,
            }
            pids[fork(lambda v=variables, r=rank: be_worker(v, names, logs[r]))] = rank
        ends = watch(pids, GROUP_LIMIT_S)
    return {"ends": ends, "written": [log.read_text() for log in logs]}


if __name__ == "__main__":
    tell_groups(run)
