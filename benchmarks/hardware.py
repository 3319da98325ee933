"""Step times and peak memory of six models: measured here, and estimated from a data sheet.

    python benchmarks/hardware.py measure --device cuda --out steps.json     # H200: under 3 minutes
    python benchmarks/hardware.py measure --device cpu --out steps.json
    python benchmarks/hardware.py compare steps.json --hardware h200
    python benchmarks/hardware.py probe --hardware cpu-core            # a CPU, by gossamer probe

A step is forward, backward and the optimiser, eager. fp32 switches TF32 off, tf32 switches it on,
bf16 runs forward under autocast. Each model is a task, too: gossamer probe --task
benchmarks/hardware.py:resnet20.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer import Task
from gossamer.tasks.models import lenet5
from gossamer.tasks.models import resnet18 as resnet18_model
from gossamer.tasks.models import resnet20 as resnet20_model
from gossamer.tasks.text import CharacterTransformer

SAMPLES = 2048
CPU_THREADS = 1


class Gpt(nn.Module):
    """GPT-2's blocks with torch's fused attention, half as deep and two thirds as wide."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token(tokens) + self.place(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.scores(self.norm(hidden)).flatten(0, 1)


class GptBlock(nn.Module):
    """Attention and a perceptron, each after a normalisation and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.projections(self.first_norm(hidden)).split(width, -1)
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(functional.gelu(self.up(self.second_norm(hidden))))


# ---------------------------------------------------------------------- the six models as tasks


def _images(name: str, model: Callable[[], nn.Module], shape: tuple[int, ...], batch: int) -> Task:
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, *shape, generator=draws)
    return Task.of(
        model, nn.CrossEntropyLoss(), (inputs, torch.randint(10, (SAMPLES,), generator=draws)),
        name=name, batch=batch, optimiser="sgd:momentum=0.9",
    )  # fmt: skip


def _tokens(
    name: str, model: Callable[[], nn.Module], vocabulary: int, length: int, batch: int
) -> Task:
    draws = torch.Generator().manual_seed(0)
    text = torch.randint(vocabulary, (SAMPLES // 4, length), generator=draws)
    return Task.of(
        model, lambda scores, text: functional.cross_entropy(scores.flatten(0, -2), text.flatten()),
        (text, text), metric=None, name=name, batch=batch, optimiser="adamw",
    )  # fmt: skip


def mlp() -> Task:
    return _images(
        "mlp",
        lambda: nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        ),
        (784,), 32,
    )  # fmt: skip


def lenet() -> Task:
    return _images("lenet", lenet5, (1, 28, 28), 32)


def resnet20() -> Task:
    return _images("resnet20", resnet20_model, (3, 32, 32), 32)


def resnet18() -> Task:
    return _images("resnet18", resnet18_model, (3, 32, 32), 8)


def characters() -> Task:
    return _tokens("characters", lambda: CharacterTransformer(65, 4, 4, 128, 64), 65, 64, 16)


def gpt() -> Task:
    return _tokens("gpt", lambda: Gpt(16_384, 512, 6, 8, 256), 16_384, 256, 2)


MODELS: dict[str, Callable[[], Task]] = {
    made.__name__: made for made in (mlp, lenet, resnet20, resnet18, characters, gpt)
}
BATCHES = {
    "cpu": {"mlp": (32, 128), "lenet": (32, 128), "resnet20": (16, 64), "resnet18": (4, 16),
            "characters": (16, 64), "gpt": (1, 4)},
    "cuda": {"mlp": (128, 8192), "lenet": (128, 4096), "resnet20": (128, 1024),
             "resnet18": (128, 1024), "characters": (64, 1024), "gpt": (8, 64)},
}  # fmt: skip
PRECISIONS = {"cpu": ("fp32",), "cuda": ("fp32", "tf32", "bf16")}


# ---------------------------------------------------------------------- measuring


class Step:
    """One model on a device, with its optimiser and one batch."""

    def __init__(self, task: Task, batch: int, device: torch.device, precision: str) -> None:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.manual_seed(0)
        self.module = task.make_model().to(device).train()
        self.loss = task.loss
        parameters = self.module.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters, lr=1e-4)
            if task.optimiser == "adamw"
            else torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
        )
        count = -(-batch // len(task.train))
        self.inputs, self.targets = (
            part.repeat(count, *(1,) * (part.dim() - 1))[:batch].to(device)
            for part in (task.train.inputs, task.train.targets)
        )
        self.is_half, self.kind = precision == "bf16", device.type

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.kind, torch.bfloat16, enabled=self.is_half):
            loss = self.loss(self.module(self.inputs), self.targets)
        loss.backward()
        self.optimizer.step()


def measure_one(name: str, batch: int, device: torch.device, precision: str, share_s: float) -> Any:
    """The median seconds of a step over several rounds, and the peak of torch's allocator."""
    step = Step(MODELS[name](), batch, device, precision)
    is_gpu = device.type == "cuda"
    for _ in range(3):
        step()
    wait(device)
    began = time.perf_counter()
    step()
    wait(device)
    lasts = time.perf_counter() - began
    repeats = max(1, min(200, round(share_s / 6 / lasts)))
    rounds: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        wait(device)
        rounds.append((time.perf_counter() - began) / repeats)
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
        step()
        wait(device)
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = cpu_peak(step)
    return {
        "model": name, "batch": batch, "precision": precision, "device": device.type,
        "seconds": statistics.median(rounds), "fastest": min(rounds), "slowest": max(rounds),
        "steps": 5 * repeats, "peak_bytes": peak,
    }  # fmt: skip


def cpu_peak(step: Step) -> int:
    """What lives at most during a step, as torch's allocator tells the profiler."""
    lasting = [*step.module.parameters(), *step.module.buffers(), step.inputs, step.targets]
    lasting += [p.grad for p in step.module.parameters() if p.grad is not None]
    lasting += [
        value for state in step.optimizer.state.values() for value in state.values()
        if isinstance(value, Tensor)
    ]  # fmt: skip
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    live = most = 0
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most + sum(tensor.nbytes for tensor in lasting)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(device: torch.device, names: list[str], seconds: float, out: Path) -> None:
    """Measure all cases, each for its share of the time; what was measured is written at once."""
    torch.set_num_threads(CPU_THREADS)
    kind = device.type
    cases = [
        (name, batch, precision)
        for name in names
        for batch in BATCHES[kind][name]
        for precision in PRECISIONS[kind]
    ]
    made = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if kind == "cuda" else "CPU, 1 thread",
        "rows": [],
    }  # fmt: skip
    ends = time.monotonic() + seconds
    for left, (name, batch, precision) in zip(range(len(cases), 0, -1), cases, strict=True):
        share = max(0.2, 0.6 * (ends - time.monotonic()) / left)
        row = measure_one(name, batch, device, precision, share)
        made["rows"].append(row)
        print(
            f"{name:10} batch {batch:5} {precision}: {1e3 * row['seconds']:9.3f} ms, "
            f"{row['peak_bytes'] / 1e6:9.1f} MB",
            flush=True,
        )
        out.write_text(json.dumps(made, indent=1))
        if kind == "cuda":
            torch.cuda.empty_cache()


# ---------------------------------------------------------------------- beside the estimate


def compare(path: Path, hardware: str) -> int:
    """Print estimated beside measured, and how many models are within 30 % at every batch."""
    from gossamer.plan.hardware.device import find_device
    from gossamer.plan.hardware.operators import step_work
    from gossamer.plan.hardware.roofline import step_seconds

    made = json.loads(path.read_text())
    device = find_device(hardware)
    print(f"{made['device']}, torch {made['torch']}; estimated from the sheet of {device.title}\n")
    print("| model | batch | precision | measured ms | estimated ms | error | measured MB | "
          "estimated MB | error |\n| --- " + "| --- " * 8 + "|")  # fmt: skip
    worst: dict[tuple[str, str], tuple[float, float]] = {}
    for row in made["rows"]:
        task = MODELS[row["model"]]()
        work = step_work(task, row["batch"], precision=row["precision"])
        times = step_seconds(work, device, row["precision"])
        took, needs = times.total_s, work.peak_bytes + device.workspace
        error, apart = took / row["seconds"] - 1, needs / row["peak_bytes"] - 1
        key = row["model"], row["precision"]
        before = worst.get(key, (0.0, 0.0))
        worst[key] = max(before[0], error, key=abs), max(before[1], apart, key=abs)
        print(
            f"| {row['model']} | {row['batch']} | {row['precision']} | {1e3 * row['seconds']:.3f} "
            f"| {1e3 * took:.3f} | {100 * error:+.0f} % | {row['peak_bytes'] / 1e6:.0f} "
            f"| {needs / 1e6:.0f} | {100 * apart:+.0f} % |"
        )
    for precision in dict.fromkeys(key[1] for key in worst):
        own = {name: found for (name, kind), found in worst.items() if kind == precision}
        times = [name for name, found in own.items() if abs(found[0]) <= 0.3]
        peaks = [name for name, found in own.items() if abs(found[1]) <= 0.3]
        print(
            f"\n{precision}: within 30 % at both batches: time {len(times)} of {len(own)} "
            f"({', '.join(times)}), memory {len(peaks)} of {len(own)} ({', '.join(peaks)})"
        )
    return 0


def probed(names: list[str], hardware: str, seconds: float) -> int:
    """Print what `gossamer probe` measures of a gradient on this CPU, beside the estimate."""
    import gossamer
    from gossamer.plan.hardware.device import find_device
    from gossamer.plan.hardware.estimate import estimate

    device = find_device(hardware)
    print("| model | batch | gradient, probed ms | estimated ms | error |\n|---|---|---|---|---|")
    for name in names:
        batch = BATCHES["cpu"][name][0]
        task = f"{Path(__file__).resolve()}:{name}"
        found = gossamer.probe(
            task, 1, batch=batch, seconds=seconds / len(names), threads=CPU_THREADS, progress=False
        )
        took = found.cluster.compute.mean_seconds(batch)
        needs = estimate(MODELS[name](), device, batch=batch).time.gradient_s
        print(
            f"| {name} | {batch} | {1e3 * took:.3f} | {1e3 * needs:.3f} "
            f"| {100 * (needs / took - 1):+.0f} % |",
            flush=True,
        )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    measuring.add_argument("--models", default=",".join(MODELS))
    measuring.add_argument("--seconds", type=float, default=100.0)
    measuring.add_argument("--out", type=Path, default=Path("steps.json"))
    comparing = commands.add_parser("compare")
    comparing.add_argument("path", type=Path)
    comparing.add_argument("--hardware", default="cpu-core")
    probing = commands.add_parser("probe")
    probing.add_argument("--hardware", default="cpu-core")
    probing.add_argument("--models", default=",".join(MODELS))
    probing.add_argument("--seconds", type=float, default=100.0)
    given = parser.parse_args()
    if given.command == "probe":
        return probed(given.models.split(","), given.hardware, given.seconds)
    if given.command == "compare":
        return compare(given.path, given.hardware)
    measure(torch.device(given.device), given.models.split(","), given.seconds, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
