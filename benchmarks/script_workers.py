"""What a script in virtual time costs, beside the same gradients one after the other.

    python benchmarks/script_workers.py            16 workers, all-reduce and AD-PSGD
    python benchmarks/script_workers.py --json     one JSON object as the last line

The script of this benchmark computes gradients of a convolutional network, each with a batch of its
own, and descends along each. Once it does so alone, as plain PyTorch, for as many gradients as all
simulated workers make together. Then it is run in virtual time. Both are timed in turns, in one
run, from the first gradient to the last; the start of the processes is shown apart.
"""

from __future__ import annotations

import argparse
import json
import os
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
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            worker.step()
        print(time.perf_counter() - began, flush=True)


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
        started = time.perf_counter()
        result = simulation.run()
        ended = time.perf_counter()
    return {"start": started - began, "run": ended - started, "digest": result.digest}


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
    found: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "workers": WORKERS}
    for method in ("all_reduce", "ad_psgd"):
        ratios: list[float] = []
        for _ in range(given.repeats):
            began = time.perf_counter()
            train(given.steps * WORKERS, given.width, given.batch)
            alone = time.perf_counter() - began
            told = simulated(server, method, given.steps, arguments)
            ratios.append(told["run"] / alone)
        each = alone / (given.steps * WORKERS) * 1e3
        found[method] = {"ratio": sorted(ratios)[len(ratios) // 2], "of": ratios, **told}
        print(
            f"{method}: {found[method]['ratio']:.2f} of the time that the same gradients take one "
            f"after the other ({each:.1f} ms each); starting took {told['start']:.1f} s",
            file=sys.stderr,
        )
    server.close()
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
