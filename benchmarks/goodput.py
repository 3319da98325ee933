"""Goodput of real workers of which one is killed, beside the simulator's prediction.

    python benchmarks/goodput.py --write docs/benchmarks/goodput.json

Gradients mostly sleep (`--slow`), so that workers do not take the processors from each other; the
deaths, messages and updates are real. A first run, in which nobody dies, measures how long a
gradient takes, and how long the run. The simulator is told
the time of a gradient and when the worker was last heard of, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import gossamer
from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.faults import Fault
from gossamer.real.faults.fault_plan import FaultPlan

WORKERS, EPOCHS, SLOW = 4, 8, 30.0
METHODS = ("ad_psgd", "pull_gossip", "downpour:standby=sync")
SHARES = (0.0, 0.25, 0.6)
"""After which part of the run worker 0 dies, which hosts server 0; 0: nobody dies."""


def end_worker(rank: int) -> None:
    """Kill that worker, which is a child of this process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_own = f"PPid:\t{os.getpid()}\n" in (folder / "status").read_text()
            variables = (folder / "environ").read_bytes().split(b"\0") if is_own else []
        except OSError:
            continue
        if f"GOSSAMER_RANK={rank}".encode() in variables:
            os.kill(int(folder.name), signal.SIGKILL)


def ran(method: str, dies_at: float | None) -> dict[str, Any]:
    """The summary of a real run in which worker 0 is killed after so many seconds of training."""
    slow = tuple(Fault("slow", amount=SLOW, worker=rank) for rank in range(WORKERS))
    killed: list[float] = []

    def watch(rank: int, entry: dict[str, Any]) -> None:
        if dies_at is not None and not killed and entry["seconds"] >= dies_at:
            killed.append(entry["seconds"])
            end_worker(0)

    result = gossamer.train(
        "digits-mlp", method, workers=WORKERS, epochs=EPOCHS, faults=FaultPlan(slow),
        evaluations=1, on_progress=watch,
    )  # fmt: skip
    return dict(result.summary)


def predicted(method: str, step_s: float, died_at: float | None) -> float:
    """The goodput in virtual time."""
    cluster = Cluster(
        workers=WORKERS, compute=Compute(seconds=step_s, jitter=0.05),
        network=Wires(bandwidth=5e9, latency=2e-5), failure_detection=0.05,
        faults=() if died_at is None else (Fault("kill", at=died_at, worker=0),),
    )  # fmt: skip
    if died_at is not None and ":" in method:
        method, cluster = method, cluster.changed(faults=[Fault("kill-server", died_at, worker=0)])
    run = gossamer.simulate("digits-mlp", method, cluster, epochs=EPOCHS, engine="none")
    return float(run.summary["goodput"])


def measure(method: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    usual = ran(method, None)
    step_s = sum(usual["computing_seconds"]) / usual["steps"]
    for share in SHARES:
        told, died_at = usual, None
        if share:
            told = ran(method, share * usual["wall_seconds"])
            wall = told["wall_seconds"]
            died_at = wall * (1 - WORKERS * told["time_shares"]["absent"])
        ours = predicted(method, step_s, died_at)
        row = {
            "method": method, "died_at": died_at, "seconds": told["wall_seconds"],
            "measured": told["goodput"], "predicted": ours, "shares": told["time_shares"],
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    chosen = parser.parse_args()
    rows = [row for method in METHODS for row in measure(method)]
    if chosen.write is not None:
        chosen.write.write_text(json.dumps({"workers": WORKERS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
