"""The vectorised engine on a GPU against one model on the whole batch, and against its peers.

    PYTHONPATH=src python benchmarks/gpu.py --write docs/benchmarks/gpu.json

The limit is what the same GPU needs for one model on all samples at once, as a practitioner does
it: compiled, attention by the fused kernels, autocast. No way of computing separate gradients for
separate workers can be expected to beat it by much. Every figure comes from a process of its own;
ten of them prepare and compile side by side, and take turns when they measure.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from gpu_models import CASES
from timing import best_seconds, synchronise
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from gossamer import Task, load_cluster
from gossamer.config.settings import make_settings
from gossamer.precision import autocasting, rounding_as
from gossamer.sim.engine import Evaluated, LoopEngine, VectorEngine
from gossamer.sim.simulation import Simulation
from gossamer.tasks.flat_model import FlatModel

KINDS = {
    "limit": "one model, whole batch",
    "compiled": "compiled",
    "traced": "traced",
    "loop": "loop",
    "by_hand": "torch.func by hand",
    "processes": "process per worker",
    "run": "whole run",
}
GOALS = {"lenet": 1.3, "resnet20": 1.2, "resnet18": 2.0, "transformer": 1.6, "gpt2": 1.8}
_MOST_PROCESSES = 8
_RUN_STEPS = {"lenet": 300, "transformer": 200}


class Rig:
    """One case on the device, ready to be computed in any way."""

    def __init__(self, name: str, precision: str, device: torch.device) -> None:
        make, self.workers, self.batch = CASES[name]
        self.name, self.precision, self.device = name, precision, device
        if device.type == "cpu":  # only to see that everything works
            self.workers, self.batch = 2, 2
        self.task: Task = make()
        self.model = FlatModel(self.task, device, seed=0, precision=precision)
        noise = torch.randn(self.workers, self.model.layout.total, device=device)
        samples = (self.workers, self.batch)
        self.given = (
            self.model.initial + 1e-3 * noise,
            self.model.initial_buffers.repeat(self.workers, 1),
            torch.randint(len(self.task.train), samples, device=device),
            torch.arange(self.workers, device=device),
        )

    def plain_step(self, batches: Tensor, *, compiled: bool) -> Callable[[], object]:
        """A gradient of one model as its user would write it."""
        module = self.model.module
        inputs, targets = self.model.task.train.at(batches)

        def loss(inputs: Any, targets: Any) -> Tensor:
            with autocasting(self.precision, self.device):
                output = module(inputs)
                return functional.cross_entropy(output.flatten(0, -2), targets.flatten())

        function = torch.compile(loss, dynamic=False) if compiled else loss

        def step() -> None:
            module.zero_grad(set_to_none=True)
            function(inputs, targets).backward()

        return step

    def engine(self, kind: str) -> LoopEngine | VectorEngine:
        if kind == "loop":
            return LoopEngine(self.model)
        is_compiled = kind == "compiled"
        return VectorEngine(self.model, compiled=is_compiled, trace_after=0, compile_after=0)

    def by_hand(self) -> Callable[[], object]:
        """What one writes without this package: `vmap(grad(...))` over stacked parameters."""
        per_worker = vmap(grad(self.model.flat_loss, has_aux=True))
        points, buffers, batches, keys = self.given
        inputs, targets = self.model.task.train.at(batches)
        return lambda: per_worker(points, buffers, inputs, targets, keys)


def measured(
    name: str, precision: str, kind: str, lock: Path, device: torch.device
) -> dict[str, Any]:
    rig = Rig(name, precision, device)
    found: dict[str, Any] = {"model": name, "precision": precision, "kind": kind,
                             "workers": rig.workers, "batch": rig.batch}  # fmt: skip
    with rounding_as(precision, device):
        if kind == "processes":
            return found | _as_processes(rig, lock)
        if kind == "run":
            return found | _as_run(rig, lock)
        engine = None
        if kind == "limit":
            work = rig.plain_step(rig.given[2].reshape(-1), compiled=True)
        elif kind == "by_hand":
            work = rig.by_hand()
        else:
            engine = rig.engine(kind)
            work = lambda: engine.evaluate(*rig.given)  # noqa: E731
        began = time.perf_counter()
        work()
        synchronise()
        found["first_seconds"] = time.perf_counter() - began
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with alone(lock):
            repeats = 2 if kind in ("loop", "by_hand") else 10
            found["ms"] = 1e3 * best_seconds(work, rounds=5, repeats=repeats)
            found["kernels"] = kernels_of(work) if device.type == "cuda" else []
        if device.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        if engine is not None:
            found["notices"] = engine.notices
            one, two = engine.evaluate(*rig.given), engine.evaluate(*rig.given)
            found["same_bits"] = bool((one.gradients == two.gradients).all())
    return found


def _as_processes(rig: Rig, lock: Path) -> dict[str, Any]:
    """Some workers as processes that compute at the same time; more would wait for the GPU."""
    count = min(rig.workers, _MOST_PROCESSES)
    own = [sys.executable, __file__, "--step", f"{rig.name},{rig.precision},{rig.device.type}"]
    started = [
        subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
    with alone(lock):
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        times = [float(process.communicate()[0]) for process in started]
    return {"ms": 1e3 * max(times) * rig.workers / count, "processes": count}


def step_in_process(text: str) -> None:
    """One worker of `_as_processes`: seconds per step beside the others."""
    name, precision, kind = text.split(",")
    device = torch.device(kind)
    rig = Rig(name, precision, device)
    with rounding_as(precision, device):
        step = rig.plain_step(rig.given[2][0], compiled=False)
        for _ in range(5):
            step()
        synchronise()
        print("ready", flush=True)
        sys.stdin.readline()
        began, steps = time.perf_counter(), 20
        for _ in range(steps):
            step()
        synchronise()
        print((time.perf_counter() - began) / steps, flush=True)


class CountingEngine:
    """Passes everything on, and counts how many workers were evaluated together."""

    def __init__(self, engine: LoopEngine | VectorEngine) -> None:
        self._engine = engine
        self.notices = engine.notices
        self.widths: Counter[int] = Counter()

    def evaluate(self, points: Tensor, buffers: Tensor, batches: Tensor, keys: Tensor) -> Evaluated:
        self.widths[len(points)] += 1
        return self._engine.evaluate(points, buffers, batches, keys)


def _as_run(rig: Rig, lock: Path) -> dict[str, Any]:
    """Simulated runs, everything included, over their gradients alone, which are the same numbers
    of workers evaluated again; and the same for what a run costs more that is three times as long.

    Only a width that always comes is compiled here: asynchronous runs have many.
    """
    task = dataclasses.replace(rig.task, test=rig.task.test.first(8))
    found: dict[str, Any] = {}
    steps = _RUN_STEPS.get(rig.name, 60) if rig.device.type == "cuda" else 6
    for method, kind in (("all_reduce", "compiled"), ("ad_psgd", "traced")):
        engine = rig.engine(kind)
        engine.evaluate(*rig.given)
        seconds: list[float] = []
        gradients: list[float] = []
        for share in (3, 3, 1):  # the first makes traces for every width that comes
            settings = make_settings(
                task, method, load_cluster("equal-8").changed(workers=rig.workers),
                device=rig.device.type, batch=rig.batch, precision=rig.precision, evaluations=1,
                epochs=share * steps * rig.workers * rig.batch / (3 * len(task.train)),
                learning_rate=0.001,
            )  # fmt: skip
            counting = CountingEngine(engine)
            with alone(lock):
                simulation = Simulation(settings, engine=counting, model=rig.model)
                began = time.perf_counter()
                simulation.run()
                synchronise()
                seconds.append(time.perf_counter() - began)
                if len(seconds) > 1:
                    gradients.append(_gradient_seconds(engine, rig, counting.widths))
        (_, whole, third), (all_of_it, part) = seconds, gradients
        found[method] = {
            "kind": kind, "steps": steps, "seconds": whole, "gradient_seconds": all_of_it,
            "mean_width": simulation.world.batcher.mean_width,
            "over_gradients": whole / all_of_it,
            "further_over_gradients": (whole - third) / (all_of_it - part),
        }  # fmt: skip
    return found


def _gradient_seconds(engine: LoopEngine | VectorEngine, rig: Rig, widths: Counter[int]) -> float:
    total = 0.0
    for width, count in widths.items():
        given = [one[:width] for one in rig.given]
        work = lambda given=given: engine.evaluate(*given)  # noqa: E731
        total += count * best_seconds(work, rounds=3, repeats=5)
    return total


def kernels_of(work: Callable[[], object]) -> list[tuple[str, float, int]]:
    """The kernels that take most of the time: name, milliseconds and calls of one evaluation."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        synchronise()
    found = [
        (e.key[:100], e.self_device_time_total / 1e3, e.count) for e in profiler.key_averages()
    ]
    return sorted(found, key=lambda kernel: -kernel[1])[:12]


@contextlib.contextmanager
def alone(lock: Path) -> Generator[None]:
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def as_markdown(found: dict[str, Any]) -> str:
    rows = {
        (r["model"], r["precision"], r["kind"]): r for r in found["figures"] if "error" not in r
    }
    kinds = [kind for kind in KINDS if kind != "run"]
    whole = "| whole run, precision, method | mean width | over its gradients | of further steps |"
    lines = [
        f"| model, workers x batch, precision | {' | '.join(KINDS[k] for k in kinds)} | "
        "compiled over limit | goal |",
        "|---|" + "---|" * (len(kinds) + 2),
    ]
    for name, goal in GOALS.items():
        for precision in ("bf16", "tf32"):
            own = {kind: rows.get((name, precision, kind)) for kind in kinds}
            if own["limit"] is None:
                continue
            times = [f"{row['ms']:.2f} ms" if row else "" for row in own.values()]
            compiled, limit = own["compiled"], own["limit"]
            ratio = f"**{compiled['ms'] / limit['ms']:.2f}**" if compiled else ""
            case = f"{name}, {limit['workers']} x {limit['batch']}, {precision}"
            lines.append(f"| {case} | {' | '.join(times)} | {ratio} | {goal} |")
    lines += ["", whole, "|---|---|---|---|"]
    for (name, precision, kind), row in rows.items():
        for method in ("all_reduce", "ad_psgd") if kind == "run" else ():
            run = row[method]
            lines.append(
                f"| {name}, {precision}, {method}, {run['steps']} steps, {run['kind']} | "
                f"{run['mean_width']:.1f} | {run['over_gradients']:.2f} | "
                f"{run['further_over_gradients']:.2f} |"
            )
    return "\n".join([*lines, "", f"Device: {found['device']}, torch {found['torch']}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="", help="such as gpt2,lenet or compiled,limit")
    parser.add_argument("--seconds", type=float, default=600.0, help="of everything together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--step", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        step_in_process(arguments.step)
        return
    if arguments.one:
        name, precision, kind, lock = arguments.one.split(",")
        device = torch.device(arguments.device)
        print(json.dumps(measured(name, precision, kind, Path(lock), device)))
        return
    jobs = [
        (name, precision, kind)
        for kind in ("compiled", "limit", "run", "traced", "loop", "by_hand", "processes")
        for precision in ("bf16", "tf32")
        for name in sorted(
            CASES, key=["resnet18", "gpt2", "resnet20", "transformer", "lenet"].index
        )
        if kind in ("compiled", "limit", "traced") or precision == "bf16"
        if kind != "run" or name in ("transformer", "lenet")
    ]
    chosen = set(arguments.only.split(",")) - {""}
    for group in (chosen & set(CASES), chosen & set(KINDS)):
        jobs = [job for job in jobs if not group or group & set(job)]
    until = time.monotonic() + arguments.seconds
    found: dict[str, Any] = {"device": arguments.device, "torch": torch.__version__, "figures": []}
    if arguments.device == "cuda":
        found["device"] = torch.cuda.get_device_name()

    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(10) as pool:

        def work(job: tuple[str, str, str]) -> dict[str, Any]:
            own = [sys.executable, __file__, "--device", arguments.device,
                   "--one", ",".join((*job, f"{place}/lock"))]  # fmt: skip
            named = dict(zip(("model", "precision", "kind"), job, strict=True))
            try:
                done = subprocess.run(
                    own, capture_output=True, text=True, timeout=max(1.0, until - time.monotonic())
                )
            except subprocess.TimeoutExpired:
                return named | {"error": "no time was left"}
            if done.returncode:
                return named | {"error": done.stderr[-1500:]}
            return json.loads(done.stdout.splitlines()[-1])

        for done in as_completed([pool.submit(work, job) for job in jobs]):
            row = done.result()
            found["figures"].append(row)
            shown = {key: value for key, value in row.items() if key != "kernels"}
            print(json.dumps(shown), flush=True)
            if arguments.write:
                arguments.write.parent.mkdir(parents=True, exist_ok=True)
                arguments.write.write_text(json.dumps(found, indent=1) + "\n")
                arguments.write.with_suffix(".md").write_text(as_markdown(found))
    print(as_markdown(found))


if __name__ == "__main__":
    main()
