"""The laboratory against a loop over the points of its grid, as a ratio within one run.

    python benchmarks/laboratory.py                  digits-mlp on the CPU, a minute
    PYTHONPATH=src python benchmarks/laboratory.py --device cuda    LeNet-5 on random images

Both sides make the same steps of the same 48 trainings: gradient, delay, update. The loop is plain
PyTorch with torch.optim, one training after the other, and delays by holding on to the gradients of
the last steps, which costs next to nothing. With --json one JSON object is the last line; --write
FILE keeps it, with the table as Markdown beside it.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import tell
from timing import best_seconds, synchronise
from torch import Tensor, nn

from gossamer import Data, Task, make_task
from gossamer.studies.lab.grid import (
    DEFAULT_DELAYS,
    DEFAULT_RATES,
    Grid,
    GridPoint,
    named_optimisers,
)
from gossamer.studies.lab.training import GroupTraining, Models
from gossamer.tasks.models import lenet5
from gossamer.tasks.task import ACCURACY, cross_entropy


def lenet_task() -> Task:
    """Random images: the time does not depend on what is on them."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8192, 1, 28, 28, generator=generator)
    data = Data(images, torch.randint(10, (8192,), generator=generator))
    return Task(
        name="LeNet-5", title="LeNet-5", make_model=lenet5, loss=cross_entropy, train=data,
        test=data, metric=ACCURACY, augment=None, batch=64, epochs=1.0,
        learning_rates=(0.01,),
    )  # fmt: skip


class PlainTraining:
    """One point of the grid as anybody would train it."""

    def __init__(self, task: Task, point: GridPoint, device: torch.device) -> None:
        self.module: nn.Module = task.make_model().to(device)
        self.inputs, self.targets = task.train.inputs.to(device), task.train.targets.to(device)
        self.parameters = list(self.module.parameters())
        make = torch.optim.Adam if point.optimiser == "adam" else torch.optim.SGD
        options = {} if point.optimiser == "adam" else {"momentum": 0.9}
        self.optimiser = make(self.parameters, lr=point.used_rate, **options)
        self.late: deque[list[Tensor | None]] = deque()
        self.delay = point.delay

    def step(self, batch: Tensor) -> None:
        self.optimiser.zero_grad()
        output = self.module(self.inputs[batch])
        nn.functional.cross_entropy(output, self.targets[batch]).backward()
        if self.delay:
            # zero_grad lets go of the gradients, so they can be kept without a copy.
            self.late.append([parameter.grad for parameter in self.parameters])
            if len(self.late) <= self.delay:
                return
            for parameter, gradient in zip(self.parameters, self.late.popleft(), strict=True):
                parameter.grad = gradient
        self.optimiser.step()


def measure(
    task: Task, optimiser: str, batch: int, device: torch.device, steps: int, rounds: int
) -> dict[str, Any]:
    """Milliseconds for one step of every point."""
    grid = Grid(
        named_optimisers((optimiser,)), DEFAULT_RATES, (batch,), DEFAULT_DELAYS,
        epochs=1e4 * batch / len(task.train),
    )  # fmt: skip
    (group,) = grid.groups()
    training = GroupTraining(Models(task, device, grid.seeds), group, grid)
    began = time.perf_counter()
    training.advance()
    synchronise()
    first_s = time.perf_counter() - began
    # Beyond the largest delay every row has something to apply.
    for _ in range(max(grid.delays)):
        training.advance()
    loops = [PlainTraining(task, point, device) for point in group.points]
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(len(task.train), (steps, batch), generator=generator).to(device)

    def one_after_the_other() -> None:
        for loop in loops:
            for own in batches:
                loop.step(own)

    loop_s = best_seconds(one_after_the_other, rounds=rounds, repeats=1) / steps
    together_s = best_seconds(training.advance, rounds=rounds, repeats=steps)
    return {
        "task": task.name, "optimiser": group.optimiser, "batch": batch,
        "points": len(group.points), "loop_ms": 1e3 * loop_s, "laboratory_ms": 1e3 * together_s,
        "ratio": loop_s / together_s, "first_step_s": first_s,
    }  # fmt: skip


Case = tuple[Callable[[], Task], str, int]
CASES: dict[str, tuple[Case, ...]] = {
    "cpu": (
        (lambda: make_task("digits-mlp"), "sgd", 16),
        (lambda: make_task("digits-mlp"), "adam", 16),
        (lambda: make_task("digits-mlp"), "sgd", 64),
    ),
    "cuda": (
        (lenet_task, "sgd", 64),
        (lenet_task, "adam", 64),
        (lenet_task, "adam", 16),
        (lenet_task, "sgd", 256),
    ),
}


def as_markdown(found: dict[str, Any]) -> str:
    lines = [
        "| 48 trainings of | one after the other, a step of each | together | ratio |",
        "|---|---|---|---|",
        *(
            f"| {case['task']}, {case['optimiser']}, batch {case['batch']} | {case['loop_ms']:.1f} "
            f"ms | {case['laboratory_ms']:.2f} ms | **{case['ratio']:.1f}x** |"
            for case in found["cases"]
        ),
        "",
        f"Machine: {found['machine']}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=CASES, default="cpu")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    cases = [
        measure(make(), optimiser, batch, device, arguments.steps, arguments.rounds)
        for make, optimiser, batch in CASES[arguments.device]
    ]
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}"
    found: dict[str, Any] = {
        "machine": f"{name}, torch {torch.__version__}, 1 thread",
        "ratio": cases[0]["ratio"],
        "cases": cases,
    }
    tell(found, as_markdown, arguments)


if __name__ == "__main__":
    main()
