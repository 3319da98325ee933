"""Runs groups of processes over shared memory, one scenario list after another; prints JSON.

A program of its own, so that torch is imported once and every process is a fork of it:

    python tests/real/shm_groups.py '[[3, ["scenario_a", "scenario_b"]], [2, ["scenario_c"]]]' 1 cpu

The 1 is on how many processors it believes to be; with "gpu" main memory stands in for that of a
GPU which all processes share. The answer is one object per group: how each
process ended, and what it wrote.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from main_memory import MainMemory
from programs import store_apart, watch

import transport_scenarios  # noqa: F401  # fills the table
from gossamer.real.transports.shm import (
    Segments,
    ShmTransport,
    create_segments,
    transport,
)
from transport_tools import run_group

LIMIT_S = 40.0


def become_worker(
    rank: int, size: int, port: int, segments: Segments, names: list[str], log: Path
) -> None:
    """Never returns: the process ends as the scenarios end."""
    code = 1
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.update(
            GOSSAMER_RANK=str(rank),
            GOSSAMER_SIZE=str(size),
            GOSSAMER_STORE=f"127.0.0.1:{port}",
            GOSSAMER_SHM_FDS=",".join(map(str, segments.fds)),
        )
        run_group(ShmTransport.from_environment(), names)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def run(size: int, names: list[str], folder: Path) -> dict[str, object]:
    """Start the processes, report deaths as the launcher does, kill what is left at the limit."""
    with store_apart() as port:
        segments = create_segments(size)
        logs = [folder / f"{names[0]}-{rank}.txt" for rank in range(size)]
        pids: dict[int, int] = {}
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                become_worker(rank, size, port, segments, names, logs[rank])
            pids[pid] = rank
        ends = watch(pids, LIMIT_S, told=segments.mark_dead)
    segments.close()
    return {"ends": ends, "written": [log.read_text() for log in logs]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        if sys.argv[2] == "gpu":
            transport._gpu_for = lambda device: MainMemory(Path(place))
        answers = [run(size, names, Path(place)) for size, names in json.loads(sys.argv[1])]
    print(json.dumps(answers))
