"""Runs a user's loop on groups of forked processes; prints JSON.

A program of its own, so that torch is imported once and every worker is a fork of it:

    python tests/programs/join_groups.py '[["case_of_join", 3, "all_reduce"]]'

over shared memory, or over what a fourth word names.
The answer is one object per group: how each worker ended, what it returned, and what it wrote.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import join_balance
import join_cases
import join_changes
import join_ends
import join_habits
import join_leaving
import join_servers
import join_several
import join_words
from gossamer.real.transports.conformance.group import store_apart, watch
from gossamer.real.transports.shm import Segments, create_segments
from programs import GROUP_LIMIT_S

CASES = {
    name: case
    for cases in (
        join_balance,
        join_cases,
        join_changes,
        join_ends,
        join_habits,
        join_leaving,
        join_servers,
        join_several,
        join_words,
    )
    for name, case in vars(cases).items()
}


def become_worker(case: str, rank: int, environment: dict[str, str], folder: Path) -> None:
    """Never returns: the process ends as the case ends."""
    code = 1
    try:
        with (folder / f"{rank}.txt").open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        faulthandler.dump_traceback_later(GROUP_LIMIT_S - 5)  # a hang says where
        os.environ.update(environment, GOSSAMER_RANK=str(rank), GOSSAMER_LOCAL_RANK=str(rank))
        torch.manual_seed(100 + rank)
        answer = CASES[case](rank)
        (folder / f"{rank}.json").write_text(json.dumps(answer))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def environment_of(
    size: int, method: str, transport: str, port: int, segments: Segments
) -> dict[str, str]:
    return {
        "GOSSAMER_SIZE": str(size), "GOSSAMER_LOCAL_SIZE": str(size),
        "GOSSAMER_STORE": f"127.0.0.1:{port}", "GOSSAMER_METHOD": method,
        "GOSSAMER_SHM_FDS": ",".join(map(str, segments.fds)), "GOSSAMER_TRANSPORT": transport,
    }  # fmt: skip


def run(
    folder: Path, case: str, size: int, method: str, transport: str = "shm"
) -> dict[str, object]:
    """Start the workers, report deaths as the launcher does, kill what is left at the limit."""
    folder.mkdir()
    with store_apart() as port:
        segments = create_segments(size)
        environment = environment_of(size, method, transport, port, segments)
        pids: dict[int, int] = {}
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                become_worker(case, rank, environment, folder)
            pids[pid] = rank
        ends = watch(pids, GROUP_LIMIT_S, told=lambda rank, _: segments.mark_dead(rank))
    segments.close()
    answers = [folder / f"{rank}.json" for rank in range(size)]
    return {
        "ends": ends,
        "answers": [json.loads(a.read_text()) if a.exists() else None for a in answers],
        "written": "".join((folder / f"{rank}.txt").read_text() for rank in range(size)),
    }


def import_the_rest() -> None:
    """torch imports half of itself at an optimiser's first step: once, before the forks."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def main(more: Mapping[str, Any]) -> None:
    """The program, with the cases of another one beside those that are known here."""
    CASES.update(more)
    torch.set_num_threads(1)
    os.environ.setdefault("GOSSAMER_SECRET", "0123456789abcdef" * 4)  # by hand there is none
    import_the_rest()
    with tempfile.TemporaryDirectory() as place:
        os.environ["JOIN_FOLDER"] = place
        found = [
            run(Path(place) / f"group-{number}", *group)
            for number, group in enumerate(json.loads(sys.argv[1]))
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main({})
