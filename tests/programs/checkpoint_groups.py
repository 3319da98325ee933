"""Runs that are killed whole and resumed, without the seconds that new processes take.

A program of its own, so that torch is imported once and every worker is a fork of it:

    python tests/programs/checkpoint_groups.py '[{"method": "d_psgd", "dies_at": 25}]'

The answer is one object per case: the uninterrupted run where it is asked for, and the resumed one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gossamer.config.cluster import Cluster
from gossamer.config.settings import make_settings
from gossamer.real.train.progress import TrainingProgress
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.resume import resume
from gossamer.real.train.worker_log import FileEntries
from gossamer.real.transports.conformance.group import store_apart
from gossamer.real.transports.shm import create_segments
from programs import run_program
from train_groups import Group, become_worker, watch


@dataclass(frozen=True)
class Case:
    """A run, all of whose workers kill themselves at once; then the same run resumed."""

    method: str
    workers: int = 2
    dies_at: int | None = 18
    """The batch of a worker at which it dies, and all the others with it; None: it finishes."""
    every: str = "7steps"
    task: str = "digits-mlp"
    choices: dict[str, Any] = field(default_factory=lambda: {"epochs": 0.6, "evaluations": 1})
    grown: dict[str, Any] = field(default_factory=dict[str, Any])
    """What is different when it is resumed."""
    is_compared: bool = True
    """Whether there is an uninterrupted run of it, too."""


@dataclass(frozen=True)
class Told:
    """What came of a case."""

    killed: list[int]
    """How the workers ended first."""
    step: int
    """The checkpoint that the run went on from."""
    ends: list[int]
    resumed: dict[str, Any]
    whole: dict[str, Any]
    kept: list[str]
    """The checkpoints in the folder at the end."""
    written: str


def run_cases(cases: Sequence[Case]) -> list[Told]:
    """In a process of its own, gone afterwards with all that it started."""
    printed = run_program(__file__, json.dumps([asdict(case) for case in cases]))
    return [Told(**answer) for answer in json.loads(printed)]


# ---------------------------------------------------------------------- in the program


def run(
    case: Case, folder: Path, *, dies_at: int | None = None, every: str | None, resumes: bool
) -> tuple[list[int], int, dict[str, Any], str]:
    size, choices = case.workers, case.choices | (case.grown if resumes else {})
    settings = make_settings(case.task, case.method, Cluster(workers=size), **choices)
    job = TrainRequest(settings, folder, checkpoint_every=every)
    step = 0
    if resumes:
        found = resume(job)
        job, step = found.request, found.checkpoint.step
    (folder / "job.json").write_text(job.to_json())
    # Of workers that wait for nobody the first may be here before another has got anywhere.
    group = Group(case.method, size, dies_behind=str(folder / "checkpoint/*/manifest.json"))
    segments = create_segments(size)
    with store_apart() as port:
        variables = {
            "GOSSAMER_SIZE": str(size), "GOSSAMER_LOCAL_SIZE": str(size),
            "GOSSAMER_STORE": f"127.0.0.1:{port}", "GOSSAMER_TRANSPORT": "shm",
            "GOSSAMER_JOB": job.to_json(), "GOSSAMER_EXPLAIN_DIR": str(folder),
            "GOSSAMER_SHM_FDS": ",".join(map(str, segments.fds)),
        }  # fmt: skip
        logs = [folder / f"{rank}.txt" for rank in range(size)]
        pids: dict[int, int] = {}
        for rank in range(size):
            dies = None if dies_at is None else (rank, dies_at)
            if (pid := os.fork()) == 0:
                become_worker(dataclasses.replace(group, dies=dies), rank, variables, logs[rank])
            pids[pid] = rank
        if dies_at is not None:
            # The first death is everybody's.
            first, status = os.wait()
            ends = {pids.pop(first): os.waitstatus_to_exitcode(status)}
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        else:
            ends = {}
        ends |= watch(group, pids, folder, segments, port)[0]
    segments.close()
    follower = TrainingProgress(folder, [FileEntries(folder, rank) for rank in range(size)])
    follower.catch_up()
    written = "\n".join(log.read_text() for log in logs)
    summary = follower.result(settings, 0).summary
    return [ends[rank] for rank in range(size)], step, summary, written


def tell(case: Case) -> Told:
    with tempfile.TemporaryDirectory() as place:
        whole: dict[str, Any] = {}
        if case.is_compared:
            alone = Path(place) / "whole"
            alone.mkdir()
            _, _, whole, _ = run(case, alone, every=None, resumes=False)
        folder = Path(place) / "run"
        folder.mkdir()
        killed, *_ = run(case, folder, dies_at=case.dies_at, every=case.every, resumes=False)
        ends, step, resumed, written = run(case, folder, every=case.every, resumes=True)
        kept = sorted(path.name for path in (folder / "checkpoint").iterdir())
        return Told(killed, step, ends, resumed, whole, kept, written)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([asdict(tell(Case(**text))) for text in json.loads(sys.argv[1])]))
