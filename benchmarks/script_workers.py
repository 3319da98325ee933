"""What a script in virtual time costs, beside the same gradients one after the other.

    python benchmarks/script_workers.py            16 workers, all-reduce and AD-PSGD
    python benchmarks/script_workers.py --json     one JSON object as the last line

The script of this benchmark computes gradients of a convolutional network, each with a batch of its
own, and descends along each. Once it does so alone, as plain PyTorch, for as many gradients as all
simulated workers make together. Then it is run in virtual time. Both are timed in turns, in one
run, from the first gradient to the last; the start of the processes is shown apart. The seconds of
processors, of all processes together, say what the simulation adds, whatever else the machine does;
those of the clock are fewer by as much as the cores have worked at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gossamer
from gossamer.config.cluster import load_cluster
from gossamer.methods import parse_method
from gossamer.script.fork_server import ForkServer
from gossamer.sim.script.script_settings import Script, ScriptSettings, task_of
from gossamer.sim.script.script_simulation import ScriptSimulation

WORKERS = 16


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, 10),
    )  # fmt: skip


def train(steps: int, width: int, batch: int) -> None:
    """The script: its loop under `gossamer.join`, which alone is plain PyTorch."""
    torch.manual_seed(0)
    model = network(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, targets = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    with gossamer.join(model, optimizer, method="all_reduce", steps=steps) as worker:
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            worker.step()
        print(time.perf_counter() - began, time.process_time() - busy, flush=True)


def simulated(server: ForkServer, method: str, steps: int, arguments: list[str]) -> dict[str, Any]:
    script = Script(__file__, ("--script", *arguments, "--steps", str(steps)))
    cluster = load_cluster("one-slow-of-16")
    settings = ScriptSettings(
        task_of(script), parse_method(method), cluster, engine="none", learning_rate=0.01,
        optimiser="SGD", script=script, steps=steps,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        simulation = ScriptSimulation(settings, server, Path(folder))
        started, own = time.perf_counter(), time.process_time()
        result = simulation.run()
        ended, own = time.perf_counter(), time.process_time() - own
        said = [path.read_text().split()[-1] for path in Path(folder).glob("worker-*.out")]
        busy = own + sum(map(float, said))
    told = {"start": started - began, "run": ended - started, "processor": busy, "own": own}
    return {**told, "digest": result.digest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--script", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=10, help="of each worker")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.script:
        train(given.steps, given.width, given.batch)
        return
    torch.set_num_threads(1)
    arguments = ["--width", str(given.width), "--batch", str(given.batch)]
    server = ForkServer()
    # The first step imports parts of torch, in the server before it forks.
    train(1, given.width, given.batch)
    found: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "workers": WORKERS}
    for method in ("all_reduce", "ad_psgd"):
        ratios: list[float] = []
        added: list[float] = []
        for _ in range(given.repeats):
            began, busy = time.perf_counter(), time.process_time()
            train(given.steps * WORKERS, given.width, given.batch)
            alone, busy = time.perf_counter() - began, time.process_time() - busy
            told = simulated(server, method, given.steps, arguments)
            ratios.append(told["run"] / alone)
            added.append(told["processor"] / busy)
        each = alone / (given.steps * WORKERS) * 1e3
        found[method] = {
            "ratio": statistics.median(ratios), "of": ratios,
            "processor ratio": statistics.median(added), "processor of": added, **told,
        }  # fmt: skip
        print(
            f"{method}: {found[method]['ratio']:.2f} of the time that the same gradients take one "
            f"after the other ({each:.1f} ms each), {found[method]['processor ratio']:.2f} of the "
            f"processors' time; starting took {told['start']:.1f} s",
            file=sys.stderr,
        )
    server.close()
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
