"""Is a run that was interrupted the run in one, and what does it cost to make its events again?

    PYTHONPATH=src python benchmarks/pieces.py --device cpu
    PYTHONPATH=src python benchmarks/pieces.py --device cuda

Each run is cut at half of its events; the second half goes on from the file alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_models import images, made_task

from gossamer import Task, load_cluster, make_task
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import Unfinished
from gossamer.runs.result import Result
from gossamer.sim.checkpoint.pieces import RunPiece
from gossamer.sim.simulation import Simulation
from gossamer.tasks.models import lenet5, resnet20

METHODS = ("ad_psgd", "all_reduce", "downpour", "diloco", "push_sum")


def essence(result: Result) -> tuple[Any, ...]:
    summary = {name: value for name, value in result.summary.items() if name != "wall_seconds"}
    return json.dumps(summary, default=str), json.dumps(result.history, default=str)


def timed(settings: Settings, piece: RunPiece | None = None) -> tuple[Result | None, float]:
    began = time.perf_counter()
    try:
        result = Simulation(settings, piece=piece).run()
    except Unfinished:
        result = None
    return result, time.perf_counter() - began


def compared(task: Task, method: str, device: str, steps: int) -> dict[str, Any]:
    """One run whole, and again in two pieces."""
    workers, batch = 8, 16
    settings = make_settings(
        task, method, load_cluster("equal-8"), batch=batch, device=device, seed=7, compiled=False,
        epochs=workers * batch * steps / len(task.train), evaluations=2,
    )  # fmt: skip
    timed(settings)  # kernels are loaded and algorithms chosen
    whole, seconds = timed(settings)
    assert whole is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        timed(settings, RunPiece(path, events=whole.events // 2))
        size = path.stat().st_size
        # Cut again one event later: its time is that of making the first half again.
        _, again = timed(settings, RunPiece(path, events=whole.events // 2 + 1, resumes=True))
        found, _ = timed(settings, RunPiece(path, resumes=True))
    assert found is not None
    return {
        "task": task.name, "method": method, "is_equal": essence(found) == essence(whole),
        "microseconds_per_step": 1e6 * seconds / whole.steps,
        "microseconds_per_step_made_again": 2e6 * again / whole.steps,
        "checkpoint_mb": size / 1e6,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tasks = [make_task("digits-mlp"), made_task("LeNet-5", lenet5, images(1, 28, 28))]
    if arguments.device != "cpu":
        tasks.append(made_task("ResNet-20", resnet20, images(3, 32, 32)))
    for task in tasks:
        for method in METHODS:
            print(json.dumps(compared(task, method, arguments.device, arguments.steps)), flush=True)


if __name__ == "__main__":
    main()
