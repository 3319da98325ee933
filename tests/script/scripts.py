"""Scripts that tests run in virtual time, and how."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gossamer.config.cluster import Cluster, load_cluster
from gossamer.config.faults import parse_faults
from gossamer.methods import parse_method
from gossamer.runs.result import Result
from gossamer.script.fork_server import ForkServer
from gossamer.sim.script.script_settings import Script, ScriptSettings, task_of
from gossamer.sim.script.script_simulation import ScriptSimulation

HEAD = """
import sys, gossamer, torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
inputs = torch.randn(192, 12)
targets = (inputs @ torch.randn(12, 4)).argmax(1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=6, shuffle=True)
model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
"""
LOOP = """
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
with gossamer.join(model, optimizer, method="all_reduce", steps=16) as worker:
    for epoch in range(2):
        for batch, wanted in worker.shard(loader):
            optimizer.zero_grad()
            cross_entropy(model(batch), wanted).backward()
            worker.step()
        scheduler.step()
        with worker.consensus() as output, torch.no_grad():
            loss = cross_entropy(output(inputs), targets)
            accuracy = (output(inputs).argmax(1) == targets).float().mean()
        worker.report(loss=loss, accuracy=accuracy)
        if worker.is_main:
            print("loss", float(loss).hex(), flush=True)
"""


def written(folder: Path, *parts: str) -> str:
    path = folder / "train.py"
    path.write_text("".join(parts), encoding="utf-8")
    return str(path)


def cluster_of(workers: int = 4, **faults: list[str]) -> Cluster:
    return load_cluster("equal-8").changed(workers=workers, faults=parse_faults(**faults))


def run(
    server: ForkServer, script: str, method: str, cluster: Cluster | None = None, *,
    arguments: tuple[str, ...] = (), steps: int = 16, **choices: Any,
) -> Result:  # fmt: skip
    own = Script(script, arguments)
    settings = ScriptSettings(
        task_of(own), parse_method(method), cluster or cluster_of(), engine="none",
        learning_rate=0.05, optimiser="SGD", script=own, steps=steps, **choices,
    )  # fmt: skip
    outputs = Path(script).parent / "outputs"
    return ScriptSimulation(settings, server, outputs).run()


def printed(script: str, rank: int = 0) -> list[str]:
    return (Path(script).parent / "outputs" / f"worker-{rank}.out").read_text().splitlines()


def children(process: int) -> list[str]:
    """Who is a child of this process now."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(entry.read_text().rpartition(")")[2].split()[1]) == process:
                found.append(entry.parent.name)
        except (OSError, ProcessLookupError):
            continue
    return found


def process_of(server: ForkServer) -> int:
    return server._process.pid


def use_cores(server: ForkServer, cores: set[int]) -> set[int]:
    """Of the processes that are forked from now on; which it had before."""
    before = os.sched_getaffinity(process_of(server))
    os.sched_setaffinity(process_of(server), cores)
    return before
