"""Loops of several processes that share one GPU, coupled and plain, as a ratio within one run.

    PYTHONPATH=src python -m gossamer run -n 2 --method ad_psgd benchmarks/gpu_loop.py

Each process measures its own steps per second with the coupling and then, all of them at the same
time, without. One line of JSON per worker.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import gossamer
from gossamer.tasks.models import resnet18


def steps_per_second(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], None],
    shape: tuple[int, ...],
) -> tuple[float, float]:
    inputs = torch.randn(shape, device="cuda")
    targets = torch.randint(10, (shape[0],), device="cuda")
    loss = torch.zeros((), device="cuda")

    def once() -> None:
        nonlocal loss
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        step()

    for _ in range(20):
        once()
    torch.cuda.synchronize()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < 3.0:
        once()
        steps += 1
    torch.cuda.synchronize()
    return steps / (time.perf_counter() - began), float(loss)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "mlp"
    torch.manual_seed(0)
    if name == "mlp":
        model: nn.Module = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
        shape: tuple[int, ...] = (32, 784)
    else:
        model, shape = resnet18(), (16, 3, 32, 32)
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gossamer.join(model, optimizer) as worker:
        coupled, loss = steps_per_second(model, optimizer, worker.step, shape)
        metrics = worker.coupling.session.metrics if worker.coupling is not None else None
        rate = metrics.exchanges / max(1, metrics.steps) if metrics is not None else 0.0
    digest = float(sum(parameter.double().abs().sum() for parameter in model.parameters()))
    plain, _ = steps_per_second(model, optimizer, optimizer.step, shape)
    print(json.dumps({
        "method": str(worker.method), "model": name, "rank": worker.rank, "coupled": coupled,
        "plain": plain, "ratio": coupled / plain, "exchanges_per_step": rate, "loss": loss,
        "output": digest,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
