"""Runs a user's loop on groups of forked processes over shared memory; prints JSON.

A program of its own, so that torch is imported once and every worker is a fork of it:

    python tests/real/join_groups.py '[["case_of_join", 3, "all_reduce"]]'

The answer is one object per group: how each worker ended, what it returned, and what it wrote.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import join_cases
import join_ends
import join_servers
from programs import store_apart

from gossamer.real.shm import Segments, create_segments

LIMIT_S = 30.0
CASES = {**vars(join_cases), **vars(join_ends), **vars(join_servers)}


def become_worker(case: str, rank: int, environment: dict[str, str], folder: Path) -> None:
    """Never returns: the process ends as the case ends."""
    code = 1
    try:
        with (folder / f"{rank}.txt").open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        faulthandler.dump_traceback_later(LIMIT_S - 5)  # a hang says where
        os.environ.update(environment, GOSSAMER_RANK=str(rank), GOSSAMER_LOCAL_RANK=str(rank))
        torch.manual_seed(100 + rank)
        answer = CASES[case](rank)
        (folder / f"{rank}.json").write_text(json.dumps(answer))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def environment_of(size: int, method: str, port: int, segments: Segments) -> dict[str, str]:
    return {
        "GOSSAMER_SIZE": str(size), "GOSSAMER_LOCAL_SIZE": str(size),
        "GOSSAMER_STORE": f"127.0.0.1:{port}", "GOSSAMER_METHOD": method,
        "GOSSAMER_SHM_FDS": ",".join(map(str, segments.fds)),
    }  # fmt: skip


def run(case: str, size: int, method: str, folder: Path) -> dict[str, object]:
    """Start the workers, report deaths as the launcher does, kill what is left at the limit."""
    folder.mkdir()
    with store_apart() as port:
        segments = create_segments(size)
        environment = environment_of(size, method, port, segments)
        pids: dict[int, int] = {}
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                become_worker(case, rank, environment, folder)
            pids[pid] = rank
        ends: dict[int, int] = {}
        limit = time.monotonic() + LIMIT_S
        while len(ends) < size:
            pid, status = next(filter(any, (os.waitpid(p, os.WNOHANG) for p in pids)), (0, 0))
            if pid:
                rank = pids.pop(pid)
                ends[rank] = os.waitstatus_to_exitcode(status)
                segments.mark_dead(rank)
            elif time.monotonic() > limit:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
            else:
                time.sleep(2e-3)
    segments.close()
    answers = [folder / f"{rank}.json" for rank in range(size)]
    return {
        "ends": [ends[rank] for rank in range(size)],
        "answers": [json.loads(a.read_text()) if a.exists() else None for a in answers],
        "written": "".join((folder / f"{rank}.txt").read_text() for rank in range(size)),
    }


def import_the_rest() -> None:
    """torch imports half of itself at an optimiser's first step: once, before the forks."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    import_the_rest()
    with tempfile.TemporaryDirectory() as place:
        os.environ["JOIN_FOLDER"] = place
        found = [
            run(case, size, method, Path(place) / f"group-{number}")
            for number, (case, size, method) in enumerate(json.loads(sys.argv[1]))
        ]
    print(json.dumps(found))
