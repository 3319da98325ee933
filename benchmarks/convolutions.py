"""Gradients of many convolutional models on a CPU: every form of the convolutions, and loops.

    GOSSAMER_CACHE=off python benchmarks/convolutions.py --write docs/benchmarks/convolutions.json

Times are the best of some rounds, in which all forms take turns. The plain loop is one module per
worker with `zero_grad`, forward and backward. With --write FILE the table as JSON and, beside it,
as Markdown.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from figures import tell
from torch import nn

from gossamer import Data, Metric, Task
from gossamer.sim.engine import LoopEngine, VectorEngine
from gossamer.sim.forms.convolution import FORMS
from gossamer.sim.forms.table import FormRow, FormTable
from gossamer.sim.traces.trace_cache import forget_traces
from gossamer.tasks.flat_model import FlatModel
from gossamer.tasks.metric import fraction_correct
from gossamer.tasks.models import lenet5, resnet20

USES = "gossamer.sim.forms.chosen_forms.shipped_table"
ANYTHING = {"workers": 1.0}


def small_cnn() -> nn.Module:
    """What somebody may write for images of 16 x 16."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "small CNN": (small_cnn, (3, 16, 16)),
    "LeNet-5": (lenet5, (1, 28, 28)),
    "ResNet-20": (resnet20, (3, 32, 32)),
}


def task_of(name: str) -> Task:
    make, shape = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    data = Data(
        torch.randn(64, *shape, generator=generator),
        torch.randint(10, (64,), generator=generator),
    )
    return Task.of(
        make, nn.functional.cross_entropy, (data.inputs, data.targets), name=name,
        metric=Metric("accuracy", fraction_correct),
    )  # fmt: skip


def contestants(name: str, workers: int, batch: int) -> dict[str, Callable[[], object]]:
    """By name, a function that computes the gradients of all workers."""
    task = task_of(name)
    model = FlatModel(task, torch.device("cpu"), seed=0)
    points = model.initial.repeat(workers, 1)
    buffers = model.initial_buffers.repeat(workers, 1)
    batches = torch.randint(len(task.train), (workers, batch))
    keys = torch.arange(workers)
    modules = [task.make_model() for _ in range(workers)]

    def plain() -> None:
        for module, chosen in zip(modules, batches, strict=True):
            inputs, targets = task.train.at(chosen)
            module.zero_grad()
            nn.functional.cross_entropy(module(inputs), targets).backward()

    def with_table(table: FormTable | None) -> Callable[[], object]:
        engine = VectorEngine(model, trace_after=0)

        def run() -> object:
            return engine.evaluate(points, buffers, batches, keys)

        forget_traces()
        if table is None:
            run()
        else:
            with patch(USES, lambda: table):
                run()  # from now on it is replayed
        assert not engine.notices, engine.notices
        return run

    loop = LoopEngine(model)
    found: dict[str, Callable[[], object]] = {
        "plain loop": plain,
        "our loop": lambda: loop.evaluate(points, buffers, batches, keys),
        "table": with_table(None),
    }
    for form in FORMS:
        row = FormRow("cpu", "convolution", "fp32", ANYTHING, form, {})
        found[form] = with_table(FormTable([row]))
    return found


def milliseconds(name: str, workers: int, batch: int, seconds: float) -> dict[str, float]:
    ours = contestants(name, workers, batch)
    times: dict[str, list[float]] = {label: [] for label in ours}
    began = time.perf_counter()
    while len(times["our loop"]) < 3 or time.perf_counter() - began < seconds:
        for label, run in ours.items():
            start = time.perf_counter()
            run()
            times[label].append(1e3 * (time.perf_counter() - start))
    return {label: round(min(found), 2) for label, found in times.items()}


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    labels = list(rows[0]["milliseconds"])
    lines = [
        "| model | workers x batch | threads | " + " | ".join(labels) + " |",
        "|---|---|---|" + "---|" * len(labels),
    ]
    for row in rows:
        times = row["milliseconds"]
        cells = " | ".join(f"{times[label]:.1f}" for label in labels)
        where = f"{row['workers']} x {row['batch']} | {row['threads']}"
        lines.append(f"| {row['model']} | {where} | {cells} |")
    return (
        "\n".join(lines) + f"\n\nMilliseconds; {platform.machine()}, torch {torch.__version__}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--workers", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row of the table")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        for workers in arguments.workers:
            for threads in arguments.threads:
                torch.set_num_threads(threads)
                found = milliseconds(name, workers, arguments.batch, arguments.seconds)
                facts = {"workers": workers, "batch": arguments.batch, "threads": threads}
                rows.append({"model": name, **facts, "milliseconds": found})
                print(rows[-1], flush=True)
    tell(rows, as_markdown, arguments)


if __name__ == "__main__":
    main()
