"""Runs of `gossamer train` one after another, without the seconds that new processes take.

A program of its own, so that torch is imported once and every worker is a fork of it:

    python tests/programs/train_groups.py '[{"method": "ad_psgd", "workers": 4, "dies": [1, 30]}]'

The answer is one object per run: how each process ended, the summary, and what was written.
"""

from __future__ import annotations

import glob
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings, make_settings
from gossamer.real.train import batches as pace
from gossamer.real.train import worker_main
from gossamer.real.train.progress import TrainingProgress
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.worker_log import FileEntries
from gossamer.real.transports.conformance.group import store_apart
from gossamer.real.transports.death_notices import tell_dead
from gossamer.real.transports.shm import create_segments
from gossamer.real.transports.store import TcpStore
from programs import GROUP_LIMIT_S, LIMIT_S, run_program

_PATIENCE_S = 100.0


@dataclass(frozen=True)
class Group:
    """One run."""

    method: str
    workers: int
    transport: str = "shm"
    task: str = "digits-mlp"
    choices: dict[str, Any] = field(default_factory=dict[str, Any])
    """As for `simulate`."""
    dies: tuple[int, int] | None = None
    """Which worker kills itself when it asks for which of its batches, counted from 1."""
    dies_behind: str = ""
    """A pattern of files, one of which it waits for first."""
    killed: tuple[int, float] | None = None
    """Which worker is killed how long after the first step, in seconds."""
    stops: tuple[int, int, int] | None = None
    """Which worker stops itself when it asks for which of its batches, and after how many more
    batches each of the others wants it to go on: it does when all of them do."""
    sleeps: float = 0.0
    """How long every worker sleeps at each batch."""
    reduction: str = "messages"
    per_host: int = 0
    """As if so many workers at a time were on a host of their own; 0 means all on one."""
    limit_s: float = GROUP_LIMIT_S


@dataclass(frozen=True)
class Ran:
    """How it went."""

    ends: list[int]
    summary: dict[str, Any]
    failure: str | None
    seconds: float
    """From the beginning of the workers to the end of the last of them."""
    after_death: float | None
    """From the first death to the end of the last."""
    written: str


def run_groups(groups: Sequence[Group], limit_s: float = LIMIT_S) -> list[Ran]:
    """In a process of its own, gone afterwards with all that it started."""
    printed = run_program(__file__, json.dumps([asdict(one) for one in groups]), limit_s=limit_s)
    return [Ran(**answer) for answer in json.loads(printed)]


# ---------------------------------------------------------------------- in the program


def die_at(number: int, behind: str) -> None:
    """Whichever way batches are dealt, the worker dies when it asks for this one."""
    for dealer in (pace.RoundBatches, pace.LeasedBatches):
        given = dealer.next_batch

        def next_batch(self: Any, asked: list[int] = [0], given: Any = given) -> Any:  # noqa: B006
            asked[0] += 1
            if asked[0] == number:
                until = time.monotonic() + _PATIENCE_S
                while behind and not glob.glob(behind) and time.monotonic() < until:
                    time.sleep(1e-3)
                os.kill(os.getpid(), signal.SIGKILL)
            return given(self)

        dealer.next_batch = next_batch


def stop_at(group: Group, rank: int, place: Path) -> None:
    """SIGSTOP, and SIGCONT from the last of the others."""
    assert group.stops is not None
    sleeper, number, steps = group.stops
    stopped, others = place / "stopped", group.workers - 1
    asked, given = [0], pace.LeasedBatches.next_batch

    def next_batch(self: Any) -> Any:
        asked[0] += rank == sleeper or stopped.exists()
        if rank == sleeper and asked[0] == number:
            stopped.with_suffix(".part").write_text(str(os.getpid()))
            stopped.with_suffix(".part").rename(stopped)
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank != sleeper and asked[0] == steps:
            (place / f"went-on-{rank}").touch()
            if len(list(place.glob("went-on-*"))) == others:
                os.kill(int(stopped.read_text()), signal.SIGCONT)
        return given(self)

    pace.LeasedBatches.next_batch = next_batch


def sleep_at_batches(seconds: float) -> None:
    for dealer in (pace.RoundBatches, pace.LeasedBatches):
        given = dealer.next_batch

        def next_batch(self: Any, given: Any = given) -> Any:
            time.sleep(seconds)
            return given(self)

        dealer.next_batch = next_batch


def become_worker(group: Group, rank: int, variables: dict[str, str], log: Path) -> None:
    """Never returns: the process ends as the worker ends."""
    code = 1
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        local_rank = rank % (group.per_host or group.workers)
        os.environ.update(variables, GOSSAMER_RANK=str(rank), GOSSAMER_LOCAL_RANK=str(local_rank))
        if group.dies is not None and group.dies[0] == rank:
            die_at(group.dies[1], group.dies_behind)
        if group.stops is not None:
            stop_at(group, rank, Path(variables["GOSSAMER_EXPLAIN_DIR"]))
        if group.sleeps:
            sleep_at_batches(group.sleeps)
        code = worker_main.main()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(group: Group, folder: Path) -> Ran:
    """Start the workers, report deaths as the launcher does, kill what is left at the limit."""
    settings = make_settings(
        group.task, group.method, Cluster(workers=group.workers), **group.choices
    )
    job = TrainRequest(settings, folder)
    with store_apart() as port:
        return _run(group, settings, job, folder, port)


def _run(group: Group, settings: Settings, job: TrainRequest, folder: Path, port: int) -> Ran:
    size = group.workers
    segments = create_segments(size) if group.transport == "shm" and size > 1 else None
    variables = {
        "GOSSAMER_SIZE": str(size), "GOSSAMER_LOCAL_SIZE": str(group.per_host or size),
        "GOSSAMER_STORE": f"127.0.0.1:{port}", "GOSSAMER_TRANSPORT": group.transport,
        "GOSSAMER_REDUCTION": group.reduction, "GOSSAMER_JOB": job.to_json(),
        "GOSSAMER_EXPLAIN_DIR": str(folder),
    }  # fmt: skip
    if segments is not None:
        variables["GOSSAMER_SHM_FDS"] = ",".join(map(str, segments.fds))
    logs = [folder / f"{rank}.txt" for rank in range(size)]
    pids: dict[int, int] = {}
    for rank in range(size):
        if (pid := os.fork()) == 0:
            become_worker(group, rank, variables, logs[rank])
        pids[pid] = rank
    ends, began, died = watch(group, pids, folder, segments, port)
    over = time.monotonic()
    if segments is not None:
        segments.close()
    follower = TrainingProgress(folder, [FileEntries(folder, rank) for rank in range(size)])
    follower.catch_up()
    result = follower.result(settings, 0)
    if result.parameters is not None:
        result.summary["parameters"] = result.parameters.tolist()
    return Ran(
        [ends[rank] for rank in range(size)], result.summary, result.failure, over - began,
        None if died is None else over - died, "\n".join(log.read_text() for log in logs),
    )  # fmt: skip


def watch(
    group: Group, pids: dict[int, int], folder: Path, segments: Any, port: int
) -> tuple[dict[int, int], float, float | None]:
    """To the end of all; how they ended, when the run began and when the first died."""
    ends: dict[int, int] = {}
    began, died = time.monotonic(), None
    limit, due = began + group.limit_s, None
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic()
        if pid:
            rank = pids.pop(pid)
            ends[rank] = os.waitstatus_to_exitcode(status)
            if ends[rank] < 0 and died is None:
                died = now
            if segments is not None:
                segments.mark_dead(rank)
            if ends[rank] != 0:
                tell_dead(TcpStore.connect("127.0.0.1", port), rank, f"ended with {ends[rank]}")
            continue
        if group.killed is not None and due is None and _has_begun(folder, group.killed[0]):
            due = now + group.killed[1]
        if due is not None and now > due and group.killed is not None:
            due = float("inf")
            for pid, rank in pids.items():
                if rank == group.killed[0]:
                    os.kill(pid, signal.SIGKILL)
        if now > limit:
            limit = float("inf")
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        time.sleep(1e-3)
    return ends, began, died


def _has_begun(folder: Path, rank: int) -> bool:
    diary = folder / "workers" / f"{rank}.jsonl"
    return diary.exists() and diary.stat().st_size > 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    answers: list[dict[str, Any]] = []
    for text in json.loads(sys.argv[1]):
        with tempfile.TemporaryDirectory() as place:
            answers.append(asdict(run(Group(**text), Path(place))))
    print(json.dumps(answers))
