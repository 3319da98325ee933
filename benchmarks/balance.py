"""What batches in proportion to speed gain where one of four workers is four times slower.

    python benchmarks/balance.py                        in virtual time, on processes, in a loop
    python benchmarks/balance.py --epochs 2 --json

A gradient sleeps for a fixed time and for a time in proportion to its batch, four fifths of it at a
batch of 16, so that four workers on few cores do not take them from each other; what is computed
comes on top. Messages and sums are real, and the slow worker is slowed by `--slow 0=4` everywhere.
Both methods have the same samples in every round, so a target is reached after equally many.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.config.cluster import Cluster, Compute
from gossamer.config.faults import parse_faults
from gossamer.real.faults.fault_plan import FaultPlan
from gossamer.runs.arrival import evaluations, seconds_to

WORKERS, BATCH, SLOW = 4, 16, "0=4"
FIXED, PER_SAMPLE = 0.02, 0.005
METHODS = ("all_reduce", "all_reduce:balance=speed")
TARGET, RATE = 0.95, 0.1


def sleepy_digits() -> gossamer.Task:
    """The digits; each training batch takes its time without using a core."""

    def augment(inputs: Tensor, key: Tensor) -> Tensor:
        time.sleep(FIXED + PER_SAMPLE * len(inputs))
        return inputs

    return dataclasses.replace(gossamer.make_task("digits-mlp"), augment=augment)


def in_virtual_time(method: str, epochs: float) -> float | None:
    compute = Compute(FIXED, per_sample=PER_SAMPLE, distribution="constant", jitter=0.0)
    cluster = Cluster(workers=WORKERS, compute=compute, faults=parse_faults(slow=[SLOW]))
    result = gossamer.simulate(
        "digits-mlp", method, cluster, epochs=epochs, learning_rate=RATE, batch=BATCH,
        evaluations=evaluations(epochs),
    )  # fmt: skip
    return seconds_to(result.history, TARGET, "accuracy")


def on_processes(method: str, epochs: float) -> float | None:
    result = gossamer.train(
        f"{Path(__file__).resolve()}:sleepy_digits", method, WORKERS, epochs=epochs,
        learning_rate=RATE, batch=BATCH, evaluations=evaluations(epochs),
        faults=FaultPlan(parse_faults(slow=[SLOW])),
    )  # fmt: skip
    rows = [{**row, "virtual_seconds": row["seconds"]} for row in result.history]
    return seconds_to(rows, TARGET, "accuracy")


def in_a_loop(method: str, epochs: float) -> float | None:
    """This file, started by `gossamer run`; its reports are lines of metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "gossamer", "run", "-n", str(WORKERS), "--slow", SLOW,
             "--method", method, "--output", "folder", "--runs", folder, __file__, "--loop",
             "--epochs", str(epochs)],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        (rows_file,) = Path(folder).glob("*/metrics.jsonl")
        lines = rows_file.read_text().splitlines()
    rows = [{**row, "virtual_seconds": row["seconds"]} for row in map(json.loads, lines)]
    return seconds_to(rows, TARGET, "accuracy")


def loop(epochs: float) -> None:
    """A loop of one's own on the same task."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = gossamer.make_task("digits-mlp")
    model = task.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    data = TensorDataset(task.train.inputs, task.train.targets)
    loader = DataLoader(data, BATCH, shuffle=True, drop_last=True)
    with gossamer.join(model, optimizer) as worker:
        for epoch in range(round(epochs)):
            for inputs, targets in worker.shard(loader):
                optimizer.zero_grad()
                time.sleep(FIXED + PER_SAMPLE * len(inputs))
                cross_entropy(model(inputs), targets).backward()
                worker.step()
            with worker.consensus() as output, torch.no_grad():
                found = output(task.test.inputs).argmax(1)
            right = (found == task.test.targets).float().mean().item()
            worker.report(epochs=epoch + 1, accuracy=right)


WORLDS = {
    "in virtual time": in_virtual_time,
    "gossamer train": on_processes,
    "a loop, gossamer run": in_a_loop,
}


def measured(epochs: float) -> dict[str, dict[str, float | None]]:
    return {
        world: {method: ask(method, epochs) for method in METHODS} for world, ask in WORLDS.items()
    }


def table(found: Mapping[str, Mapping[str, float | None]]) -> str:
    lines = [
        f"| seconds to {100 * TARGET:g} % | equal batches | balance=speed | times faster |",
        "|---|---|---|---|",
    ]
    for world, times in found.items():
        equal, own = (times[method] for method in METHODS)
        faster = f"{equal / own:.2f}" if equal and own else "-"
        shown = ["never" if one is None else f"{one:.2f}" for one in (equal, own)]
        lines.append(f"| {world} | {shown[0]} | {shown[1]} | {faster} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--epochs", type=float, default=8)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)
    asked: Any = parser.parse_args()
    if asked.loop:
        loop(asked.epochs)
        return
    found = measured(asked.epochs)
    print(json.dumps(found) if asked.json else table(found))


if __name__ == "__main__":
    main()
