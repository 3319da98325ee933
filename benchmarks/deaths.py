"""How long the survivors stand still when a worker is killed.

    python benchmarks/deaths.py
    python benchmarks/deaths.py --transport shm --method ad_psgd --repeat 5 --json

Four workers train digits-mlp at no more than 60 steps a second each. In the middle one of them gets
SIGKILL. Each survivor measures the longest time between the beginnings of two of its
steps; the table shows the longest of all survivors. The same run without a death stands beside it:
what is in both columns is the machine's doing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gossamer.config.cluster import Cluster
from gossamer.config.settings import make_settings
from gossamer.methods import METHODS
from gossamer.real.launch.launch import Launch
from gossamer.real.launch.launcher import Launcher
from gossamer.real.train import worker_main
from gossamer.real.train.batches import LeasedBatches, RoundBatches
from gossamer.real.train.progress import RunListener, TrainingProgress
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.worker_log import FileEntries

METHODS_MEASURED = ("pull_gossip", "push_gossip", "ad_psgd", "d_psgd", "local_sgd", "all_reduce")
WORKERS = 4
STEP_S = 1 / 60
EPOCHS = 6
KILLED_AFTER_STEPS = 50
WORKER = "--as-worker"
GOALS = {"gossip": 0.2, "decentralised": 0.2}
OTHER_GOAL = 2.0
"""Where a group must be rebuilt."""


def process_of(rank: int) -> int:
    """The child of this process that is that worker."""
    mine = f"GOSSAMER_RANK={rank}".encode()
    for listed in Path("/proc/self/task").glob("*/children"):
        # Threads and processes come and go while they are listed.
        with contextlib.suppress(OSError):
            for pid in listed.read_text().split():
                if mine in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return int(pid)
    raise ProcessLookupError(f"worker {rank} is not here")


def work() -> int:
    """A worker that sleeps at every batch; in proportion to its speed it would amplify noise."""
    for dealer in (RoundBatches, LeasedBatches):
        dealer.next_batch = _slowed(dealer.next_batch)
    return worker_main.main()


def _slowed(next_batch: Any) -> Any:
    def slow(self: RoundBatches | LeasedBatches) -> Any:
        time.sleep(STEP_S)
        return next_batch(self)

    return slow


class Killer:
    """Kills a worker when it has made so many steps."""

    def __init__(self, victim: int | None) -> None:
        self._victim = victim

    def __call__(self, rank: int, row: dict[str, Any]) -> None:
        if rank == self._victim and row["steps"] >= KILLED_AFTER_STEPS:
            self._victim = None
            os.kill(process_of(rank), signal.SIGKILL)


def measure(method: str, transport: str, victim: int | None, seed: int) -> dict[str, Any]:
    settings = make_settings(
        "digits-mlp", method, Cluster(workers=WORKERS), epochs=EPOCHS, seed=seed, evaluations=1
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        job = TrainRequest(settings, folder)
        plan = Launch(
            [sys.executable, __file__, WORKER], WORKERS, transport=transport, folder=folder,
            tolerates_deaths=True,
            environment={"GOSSAMER_JOB": job.to_json(), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        diaries = [FileEntries(folder, rank) for rank in range(WORKERS)]
        follower = TrainingProgress(folder, diaries, RunListener(on_progress=Killer(victim)))
        said = io.StringIO()
        with follower, contextlib.redirect_stderr(said):
            status = Launcher(plan).run()
        follower.catch_up()
        result = follower.result(settings, status)
    summary = result.summary
    expected = WORKERS - (victim is not None)
    if result.status != 0 or summary["living"] != expected:
        raise SystemExit(
            f"{method} on {transport}: {summary['living']} of {expected} survivors of worker "
            f"{victim} finished\n{said.getvalue()}"
        )
    return {
        "pause": summary["longest_step_gap_seconds"],
        "steps_per_second": summary["steps"] / WORKERS / summary["wall_seconds"],
        "accuracy": summary["accuracy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transport", action="append", choices=("shm", "torch"))
    parser.add_argument("--method", action="append", choices=METHODS_MEASURED)
    parser.add_argument("--repeat", type=int, default=3, help="another victim each time")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if not chosen.json:
        print(f"{'':22}{'pause of survivors':>30}{'no death':>12}{'goal':>8}{'steps/s':>9}")
        print(f"{'':22}{'median':>18}{'longest':>12}")
    for transport in chosen.transport or ("shm", "torch"):
        for method in chosen.method or METHODS_MEASURED:
            calm = measure(method, transport, None, 0)
            found = [
                measure(method, transport, number % WORKERS, number)
                for number in range(chosen.repeat)
            ]
            pauses = [one["pause"] for one in found]
            row = {
                "transport": transport, "method": method, "pauses": pauses,
                "median": statistics.median(pauses), "longest": max(pauses),
                "without_death": calm["pause"],
                "goal": GOALS.get(METHODS[method].family, OTHER_GOAL),
                "steps_per_second": statistics.median(one["steps_per_second"] for one in found),
                "accuracy": min(one["accuracy"] for one in found),
            }  # fmt: skip
            rows.append(row)
            if not chosen.json:
                print(
                    f"{transport:8}{method:14}{row['median']:>16.3f} s{row['longest']:>10.3f} s"
                    f"{row['without_death']:>10.3f} s{row['goal']:>6.1f} s"
                    f"{row['steps_per_second']:>9.0f}",
                    flush=True,
                )
    if chosen.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    sys.exit(work() if sys.argv[1:] == [WORKER] else main())
