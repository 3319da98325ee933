"""The vectorised engine on a GPU against one model on the whole batch, within one run.

    PYTHONPATH=src python benchmarks/gpu.py --write docs/benchmarks/gpu.json

The limit is what the same GPU needs for one model on all samples at once, compiled likewise: no
way of computing separate gradients for separate workers can be expected to beat it by much.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import best_seconds
from torch import Tensor, nn

from gossamer import Data, Task, load_cluster, simulate
from gossamer.sim.engine import LoopEngine, VectorEngine
from gossamer.tasks.flat_model import FlatModel
from gossamer.tasks.models import lenet5, resnet20
from gossamer.tasks.task import ACCURACY, cross_entropy


def image_task(name: str, make_model: Callable[[], nn.Module], shape: tuple[int, ...]) -> Task:
    """Random images: the time does not depend on what is on them."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8192, *shape, generator=generator)
    labels = torch.randint(10, (8192,), generator=generator)
    data = Data(images, labels)
    return Task(
        name=name, title=name, make_model=make_model, loss=cross_entropy, train=data, test=data,
        metric=ACCURACY, augment=None, batch=32, epochs=1.0, learning_rates=(0.01,),
    )  # fmt: skip


def measure(task: Task, workers: int, batch: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds for one round of all workers: limit, loop, vectorised, compiled."""
    model = FlatModel(task, device, seed=0)
    points = model.initial + 1e-3 * torch.randn(workers, model.layout.total, device=device)
    buffers = model.initial_buffers.repeat(workers, 1)
    batches = torch.randint(len(task.train), (workers, batch), device=device)
    keys = torch.arange(workers, device=device)
    train = model.task.train
    whole = batches.reshape(-1)

    def loss(flat: Tensor) -> Tensor:
        value, _ = model.loss(
            model.layout.unpack(flat),
            buffers[0],
            train.inputs[whole],
            train.targets[whole],
            keys[0],
        )
        return value

    def one_model(function: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        flat = points[0].clone().requires_grad_()
        return lambda: torch.autograd.grad(function(flat), flat)[0]

    def seconds(engine: VectorEngine | LoopEngine, repeats: int) -> float:
        work = lambda: engine.evaluate(points, buffers, batches, keys)  # noqa: E731
        return best_seconds(work, rounds=5, repeats=repeats)

    began = time.perf_counter()
    compiled_engine = VectorEngine(model, compiled=True, trace_after=0)
    compiled_engine.evaluate(points, buffers, batches, keys)
    compile_seconds = time.perf_counter() - began
    compiled_limit = best_seconds(one_model(torch.compile(loss, dynamic=False)), repeats=20)
    found = {
        "model": task.name, "workers": workers, "batch": batch,
        "limit_ms": 1e3 * best_seconds(one_model(loss), repeats=20),
        "limit_compiled_ms": 1e3 * compiled_limit,
        "loop_ms": 1e3 * seconds(LoopEngine(model), 1),
        "traced_ms": 1e3 * seconds(VectorEngine(model, trace_after=0), 20),
        "compiled_ms": 1e3 * seconds(compiled_engine, 20),
        "compile_seconds": compile_seconds,
        "notices": compiled_engine.notices,
    }  # fmt: skip
    limit = min(found["limit_ms"], found["limit_compiled_ms"])
    found["traced_over_limit"] = found["traced_ms"] / limit
    found["compiled_over_limit"] = found["compiled_ms"] / limit
    found["loop_over_compiled"] = found["loop_ms"] / found["compiled_ms"]
    return found


def whole_run(device: str) -> dict[str, Any]:
    """A short simulated run on the device, everything included."""
    task = image_task("lenet", lenet5, (1, 28, 28))
    result = simulate(
        task, "ad_psgd", load_cluster("equal-8").changed(workers=128), device=device, batch=32,
        epochs=10, evaluations=1, compiled=False,
    )  # fmt: skip
    keys = ("wall_seconds", "steps", "events", "mean_width", "digest")
    return {key: result.summary[key] for key in keys}


def as_markdown(found: dict[str, Any]) -> str:
    lines = [
        "| model, workers x batch | one model, whole batch | loop over workers | traced | "
        "compiled | compiled over limit |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["engines"]:
        limit = min(row["limit_ms"], row["limit_compiled_ms"])
        lines.append(
            f"| {row['model']}, {row['workers']} x {row['batch']} | {limit:.2f} ms | "
            f"{row['loop_ms']:.1f} ms | {row['traced_ms']:.2f} ms | {row['compiled_ms']:.2f} ms | "
            f"**{row['compiled_over_limit']:.2f}x** |"
        )
    run = found["run"]
    lines += [
        "",
        f"A whole run there, 128 workers, LeNet, AD-PSGD, traced: {run['steps']} steps in "
        f"{run['wall_seconds']:.1f} s, mean width {run['mean_width']:.0f}.",
        "",
        f"Device: {found['device']}, torch {found['torch']}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tasks = (
        (image_task("LeNet-5", lenet5, (1, 28, 28)), 128, 32),
        (image_task("ResNet-20", resnet20, (3, 32, 32)), 16, 128),
    )
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "engines": [measure(task, workers, batch, device) for task, workers, batch in tasks],
        "run": whole_run(device.type),
    }
    print(as_markdown(found))
    print(json.dumps(found))
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(json.dumps(found, indent=2) + "\n")
        arguments.write.with_suffix(".md").write_text(as_markdown(found))


if __name__ == "__main__":
    main()
