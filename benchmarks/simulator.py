"""How fast the simulator is, as ratios within one run.

    python benchmarks/simulator.py                 everything, a few minutes
    python benchmarks/simulator.py --quick --json  the main figures in under a minute
    python benchmarks/simulator.py --many          up to 10,000 workers, with the memory they take

Prints a table; with --json one JSON object as the last line; with --write FILE the tables as JSON
and, beside it, as Markdown.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from figures import tell
from timing import best_seconds
from torch import nn

from gossamer import load_cluster, make_task, simulate
from gossamer.pending import Pending
from gossamer.sim.engine import LoopEngine, VectorEngine
from gossamer.sim.kernel import Kernel
from gossamer.tasks.flat_model import FlatModel


def kernel_events_per_second(tasks: int = 64, awaits: int = 2000) -> float:
    """Coroutines that sleep and wake, without gradients: what the heap alone can do."""

    def once() -> float:
        kernel = Kernel(seed=1)

        def sleep(nanoseconds: int) -> Pending[None]:
            pending: Pending[None] = Pending("sleep")
            kernel.at(nanoseconds, pending.resolve, None)
            return pending

        async def work() -> None:
            for step in range(awaits):
                await sleep(10 + step % 7)

        for rank in range(tasks):
            kernel.spawn(work(), rank, is_main=True)
        began = time.perf_counter()
        kernel.run()
        return kernel.events / (time.perf_counter() - began)

    return max(once() for _ in range(3))


def engine_over_loop(workers: int = 64, batch: int = 16, repeats: int = 10) -> dict[str, float]:
    """Seconds for the gradients of all workers: vectorised, our loop, and a plain PyTorch loop."""
    task = make_task("digits-mlp")
    model = FlatModel(task, torch.device("cpu"), seed=0)
    generator = torch.Generator().manual_seed(0)
    points = model.initial + 0.01 * torch.randn(workers, model.layout.total, generator=generator)
    batches = torch.randint(len(task.train), (workers, batch), generator=generator)
    keys = torch.arange(workers)
    buffers = model.initial_buffers.repeat(workers, 1)
    vector, loop = VectorEngine(model, trace_after=0), LoopEngine(model)
    modules = [task.make_model() for _ in range(workers)]

    def plain() -> None:
        for module, batch in zip(modules, batches, strict=True):
            inputs, targets = task.train.inputs[batch], task.train.targets[batch]
            module.zero_grad()
            nn.functional.cross_entropy(module(inputs), targets).backward()

    seconds = {
        "vector": best_seconds(
            lambda: vector.evaluate(points, buffers, batches, keys), repeats=repeats
        ),
        "loop": best_seconds(lambda: loop.evaluate(points, buffers, batches, keys), repeats=2),
        "plain": best_seconds(plain, repeats=2),
    }
    return seconds | {"ratio": seconds["plain"] / seconds["vector"]}


def microseconds_per_step(method: str, workers: int, steps: int, task: str) -> dict[str, float]:
    """A whole simulated run: wall time per gradient step of one worker."""
    loaded = make_task(task)
    batch = 16
    result = simulate(
        loaded, method, load_cluster("equal-8").changed(workers=workers), batch=batch,
        epochs=workers * steps * batch / len(loaded.train), evaluations=1,
    )  # fmt: skip
    summary = result.summary
    return {
        "workers": workers,
        "steps": summary["steps"],
        "events": summary["events"],
        "mean_width": summary["mean_width"],
        "wall_seconds": summary["wall_seconds"],
        "microseconds_per_step": 1e6 * summary["wall_seconds"] / summary["steps"],
    }


FAMILIES = (
    "ad_psgd", "all_reduce", "downpour", "d_psgd", "push_sum", "easgd", "ssp", "local_sgd",
    "pull_gossip",
)  # fmt: skip
MANY = (1000, 3000, 10_000)


def one_of_many(method: str, workers: int, engine: str, steps: int = 3, batch: int = 16) -> None:
    """Print the figures of one run of many workers; a process of its own knows its peak memory."""
    torch.set_num_threads(1)
    task = make_task("digits-logistic")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    result = simulate(
        task, method, load_cluster("equal-8").changed(workers=workers), batch=batch, engine=engine,
        epochs=workers * steps * batch / len(task.train), evaluations=1,
    )  # fmt: skip
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    found = {
        "workers": workers, "seconds": seconds, "peak_mb": peak / 1024,
        "microseconds_per_step": 1e6 * seconds / result.summary["steps"],
    }  # fmt: skip
    print(json.dumps(found))


def many() -> str:
    """Seconds of processor, microseconds for a step of one worker, and megabytes above the start.

    Processor time, because a neighbour on the machine does not change it by as much.
    """
    lines = [
        "| method | gradients | " + " | ".join(f"{n:,} workers" for n in MANY) + " |",
        "|---|---|" + "---|" * len(MANY),
    ]
    for method in FAMILIES:
        for engine, what in (("none", "none"), ("vector", "true")):
            cells: list[str] = []
            for workers in MANY:
                words = [sys.executable, __file__, "--one", method, str(workers), engine]
                done = subprocess.run(words, check=True, capture_output=True, text=True)
                row = json.loads(done.stdout)
                cells.append(
                    f"{row['seconds']:.1f} s, {row['microseconds_per_step']:.0f} us, "
                    f"{row['peak_mb']:.0f} MB"
                )
            lines.append(f"| {method} | {what} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    engine = engine_over_loop(repeats=5 if quick else 20)
    widths = (16, 64) if quick else (16, 64, 256, 1024)
    scaling = {
        method: [microseconds_per_step(method, n, 20, "digits-logistic") for n in widths]
        for method in ("all_reduce", "ad_psgd", "downpour")
    }
    thousand = microseconds_per_step("ad_psgd", 1024, 2 if quick else 20, "digits-logistic")
    return {
        "machine": f"{platform.machine()}, torch {torch.__version__}, 1 thread",
        "kernel_events_per_second": kernel_events_per_second(),
        "engine_over_loop": engine["ratio"],
        "engine_seconds": engine,
        "thousand_workers": thousand,
        "scaling": scaling,
    }


def as_markdown(found: dict[str, Any]) -> str:
    engine = found["engine_seconds"]
    sizes = [row["workers"] for row in next(iter(found["scaling"].values()))]
    lines = [
        "| what | measured |",
        "|---|---|",
        f"| kernel alone | {found['kernel_events_per_second']:,.0f} events/s |",
        f"| 64 workers x 16 samples, digits-mlp: vectorised | {1e3 * engine['vector']:.2f} ms |",
        f"| the same, our loop engine | {1e3 * engine['loop']:.2f} ms |",
        f"| the same, plain PyTorch loop | {1e3 * engine['plain']:.2f} ms |",
        f"| plain loop over vectorised | **{engine['ratio']:.1f}x** |",
        "",
        "Wall time of one simulated gradient step (digits-logistic, everything included):",
        "",
        "| method | " + " | ".join(f"{size} workers" for size in sizes) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    for method, rows in found["scaling"].items():
        cells = [f"{row['microseconds_per_step']:.0f} us" for row in rows]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    lines += ["", f"Machine: {found['machine']}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("METHOD", "WORKERS", "ENGINE"))
    arguments = parser.parse_args()
    if arguments.one:
        method, workers, engine = arguments.one
        one_of_many(method, int(workers), engine)
        return
    if arguments.many:
        print(many())
        return
    found = measure(arguments.quick)
    tell(found, as_markdown, arguments)


if __name__ == "__main__":
    main()
