"""Whether a run in tf32 or bf16 learns as much as one in 32 bits: accuracies over several seeds.

    PYTHONPATH=src python benchmarks/gpu_precision.py --write docs/benchmarks/gpu-precision.json

LeNet-5 and ResNet-20 learn the digits that come with the package, enlarged to the size of the
images that they were made for; the transformer learns the package's own source code. Workers, seeds
and order of samples are the same for every precision.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import gossamer
from gossamer import Data, Task, load_cluster, make_task, simulate
from gossamer.tasks.models import lenet5, resnet20
from gossamer.tasks.task import ACCURACY, cross_entropy
from gossamer.tasks.text import CharacterTransformer

SEEDS = 4
WORKERS = 8
_CONTEXT = 256
# Two-sided 95 % of Student's t for SEEDS - 1 degrees of freedom.
_T = 3.18


def digits(
    make_model: Callable[[], torch.nn.Module], size: int, channels: int, epochs: float
) -> Task:
    small = make_task("digits-mlp")

    def enlarged(data: Data) -> Data:
        images = data.inputs.float().reshape(-1, 1, 8, 8)
        larger = functional.interpolate(images, (size, size), mode="bilinear")
        return Data(larger.repeat(1, channels, 1, 1) / larger.std(), data.targets)

    return Task(
        name="digits", title="digits", make_model=make_model, loss=cross_entropy,
        train=enlarged(small.train), test=enlarged(small.test), metric=ACCURACY, augment=None,
        batch=16, epochs=epochs, learning_rates=(0.05,),
    )  # fmt: skip


def source_code() -> Task:
    files = sorted(Path(gossamer.__file__).parent.rglob("*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    text = "".join(letter if letter.isascii() else "?" for letter in text)
    alphabet = {letter: code for code, letter in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[letter] for letter in text])

    def windows(part: Tensor) -> Data:
        count = (len(part) - 1) // _CONTEXT
        shape = (count, _CONTEXT)
        inputs, targets = part[: count * _CONTEXT], part[1 : count * _CONTEXT + 1]
        return Data(inputs.view(shape), targets.view(shape))

    boundary = len(codes) * 19 // 20
    return Task(
        name="source", title="source", loss=cross_entropy, metric=ACCURACY, augment=None,
        make_model=lambda: CharacterTransformer(len(alphabet), 6, 6, 384, _CONTEXT),
        train=windows(codes[:boundary]), test=windows(codes[boundary:]), batch=8, epochs=0.6,
        learning_rates=(0.001,), optimiser="adamw", test_batch=64,
    )  # fmt: skip


TASKS: dict[str, Callable[[], Task]] = {
    "LeNet-5": lambda: digits(lenet5, 28, 1, 24.0),
    "ResNet-20": lambda: digits(resnet20, 32, 3, 10.0),
    "transformer 6 x 384": source_code,
}


def accuracies(name: str, precision: str, device: str) -> dict[str, Any]:
    task = TASKS[name]()
    cluster = load_cluster("equal-8").changed(workers=WORKERS)
    runs = [
        simulate(
            task, "all_reduce", cluster, seed=seed, precision=precision, device=device,
            evaluations=1, compiled=False,
        ).summary
        for seed in range(SEEDS)
    ]  # fmt: skip
    return {
        "model": name, "precision": precision, "digests": [run["digest"] for run in runs],
        "accuracies": [run["accuracy"] for run in runs],
    }  # fmt: skip


def as_markdown(rows: list[dict[str, Any]], device: str) -> str:
    lines = ["| model | precision | accuracy, mean of seeds | 95 % interval of fp32 | inside |",
             "|---|---|---|---|---|"]  # fmt: skip
    exact = {row["model"]: row["accuracies"] for row in rows if row["precision"] == "fp32"}
    for row in rows:
        if row["model"] not in exact:
            continue
        own = exact[row["model"]]
        mean, half = statistics.mean(own), _T * statistics.stdev(own) / len(own) ** 0.5
        value = statistics.mean(row["accuracies"])
        lines.append(
            f"| {row['model']} | {row['precision']} | {value:.4f} | "
            f"{mean - half:.4f} to {mean + half:.4f} | {abs(value - mean) <= half} |"
        )
    return "\n".join(
        [*lines, "", f"Device: {device}, torch {torch.__version__}, {SEEDS} seeds.", ""]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, precision = arguments.one.split(",")
        print(json.dumps(accuracies(name, precision, arguments.device)))
        return
    jobs = [(name, precision) for name in reversed(TASKS) for precision in ("fp32", "tf32", "bf16")]

    def work(job: tuple[str, str]) -> dict[str, Any]:
        own = [sys.executable, __file__, "--device", arguments.device, "--one", ",".join(job)]
        done = subprocess.run(own, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"model": "", "precision": job[1], "error": done.stderr[-1000:]}
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(len(jobs)) as pool:
        rows = list(pool.map(work, jobs))
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    table = as_markdown([row for row in rows if "error" not in row], name)
    print(table, *(row["error"] for row in rows if "error" in row), sep="\n")
    if arguments.write:
        arguments.write.write_text(json.dumps({"device": name, "rows": rows}, indent=1) + "\n")
        arguments.write.with_suffix(".md").write_text(table)


if __name__ == "__main__":
    main()
