"""What processes that share a GPU must get right, as programs of `gossamer run`.

    PYTHONPATH=src python -m gossamer run -n 3 benchmarks/gpu_conformance.py reduce cuda FOLDER

Every process writes what it found as JSON into FOLDER; `real_gpu.py` starts them all and reads it.
With `cpu` in place of `cuda` the same is checked of main memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import synchronise
from torch import Tensor, nn

import gossamer
from gossamer.real.launch.environment import connect, discover
from gossamer.real.launch.selftest import finished
from gossamer.real.transports.shm.contributions import ON_GPU
from gossamer.real.transports.shm.transport import ShmTransport
from gossamer.real.transports.transport import StopToken, Window

ROUNDS = 200
LARGE = {"cuda": 11_000_000, "cpu": 100_000}
WIDTH = 100_003
VICTIM = 1
STEPS = 30


class Ears:
    """A listener that only notes who was lost."""

    def __init__(self) -> None:
        self.gone: list[int] = []

    def frame(self, source: int, data: memoryview) -> None:
        pass

    def lost(self, process: int) -> None:
        self.gone.append(process)


class Processes:
    """This process and the others, with a window each on the device."""

    def __init__(self, device: torch.device, width: int) -> None:
        transport = connect("shm")
        assert isinstance(transport, ShmTransport)
        self.transport, self.device = transport, device
        self.rank, self.size = transport.rank, transport.size
        self.ears = Ears()
        windows = {
            end: Window(width, torch.float32, end, device, device) for end in range(self.size)
        }
        initial = {self.rank: torch.zeros(width)}
        transport.open(windows, initial, self.ears, StopToken())

    def value(self, rank: int, count: int, number: int, dtype: torch.dtype) -> Tensor:
        """What that process puts in; everybody can work it out."""
        generator = torch.Generator(self.device).manual_seed(1000 * number + rank)
        return torch.randn(count, device=self.device, generator=generator).to(dtype)

    def mean(self, members: Sequence[int], count: int, number: int, dtype: torch.dtype) -> Tensor:
        values = [self.value(member, count, number, dtype) for member in members]
        total = values[0].clone()
        for value in values[1:]:
            total += value
        return total / torch.tensor(len(values), dtype=dtype, device=self.device)

    def reduce(self, count: int, number: int, dtype: torch.dtype = torch.float32) -> Tensor:
        value = self.value(self.rank, count, number, dtype)
        pending = self.transport.all_reduce([value], range(self.size))
        value.fill_(float("nan"))  # it was read before
        finished(pending)
        return value

    def meet(self) -> None:
        """Everybody has done, and not only asked for, what it did until here."""
        synchronise()
        finished(self.transport.all_reduce([torch.zeros(1)], range(self.size)))

    def was_in_arena(self) -> bool:
        """Whether the last value went through GPU memory."""
        posted = self.transport._all_reduce._posted  # pyright: ignore[reportPrivateUsage]
        return bool(posted) and bool(posted[-1].place & ON_GPU)


def reduce(device: torch.device) -> dict[str, Any]:
    """The mean, to the last bit, of values that change every time."""
    large = LARGE[device.type]
    us = Processes(device, large)
    everybody = range(us.size)
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 12_345, large):
            in_arena = 0
            # Nobody looks at it before the end: the GPU is behind, by different amounts.
            wrong = torch.zeros((), dtype=torch.int64, device=device)
            began = time.perf_counter()
            for number in range(ROUNDS):
                mean = us.reduce(count, number, dtype)
                in_arena += us.was_in_arena()
                wrong += (mean != us.mean(everybody, count, number, dtype)).any()
            found[f"{dtype} x {count}"] = {
                "rounds": ROUNDS, "wrong": int(wrong), "in_arena": in_arena,
                "seconds": time.perf_counter() - began,
            }  # fmt: skip
    us.meet()
    us.transport.close()
    is_right = all(case["wrong"] == 0 for case in found.values())
    most = 0 if device.type == "cpu" else ROUNDS - 10
    is_there = all(case["in_arena"] >= most for case in found.values())
    return {"passed": is_right and is_there, "cases": found}


def windows(device: torch.device) -> dict[str, Any]:
    """Reads see what was written, no addition is lost, averages keep the sum."""
    us = Processes(device, WIDTH)
    transport, own = us.transport, us.transport.window(us.rank)
    wrong_reads = 0
    for number in range(20):
        with transport.guard(us.rank):
            own.fill_(100.0 * us.rank + number)
        us.meet()
        for end in range(us.size):
            read = finished(transport.read(end))
            wrong_reads += not bool((read == 100.0 * end + number).all())
        us.meet()
    with transport.guard(us.rank):
        own.zero_()
    us.meet()
    ones = torch.ones(WIDTH, device=device)
    for number in range(ROUNDS):
        finished(transport.accumulate(number % us.size, ones))
    us.meet()
    added = [float(finished(transport.read(end)).double().mean()) for end in range(us.size)]
    us.meet()
    with transport.guard(us.rank):
        own.copy_(us.value(us.rank, WIDTH, 1, torch.float32))
    us.meet()
    before = _sum(us)
    us.meet()
    for number in range(ROUNDS):
        other = (us.rank + 1 + number % (us.size - 1)) % us.size
        finished(transport.average(us.rank, other))
    us.meet()
    after = _sum(us)
    us.meet()
    error = float((after - before).abs().max())
    counts = [float(us.size * len(range(end, ROUNDS, us.size))) for end in range(us.size)]
    transport.close()
    return {
        "passed": wrong_reads == 0 and added == counts and error < 1e-4,
        "wrong_reads": wrong_reads, "added": added, "expected": counts, "sum_changed_by": error,
        "torn_updates": transport.torn_updates,
    }  # fmt: skip


def averages(device: torch.device, count: int) -> dict[str, Any]:
    """Of windows: the bits of torch's own operation."""
    us = Processes(device, count)
    own = us.transport.window(us.rank)
    wrong = 0
    for number in range(20):
        with us.transport.guard(us.rank):
            own.copy_(us.value(us.rank, count, number, torch.float32))
        us.meet()
        active = number % us.size
        passive = (active + 1) % us.size
        if us.rank == active:
            finished(us.transport.average(active, passive))
        us.meet()
        expected = us.value(active, count, number, torch.float32)
        expected.lerp_(us.value(passive, count, number, torch.float32), 0.5)
        if us.rank not in (active, passive):
            expected = us.value(us.rank, count, number, torch.float32)
        wrong += not torch.equal(own, expected)
    us.meet()
    us.transport.close()
    return {"passed": wrong == 0, "wrong": wrong}


def _sum(us: Processes) -> Tensor:
    return sum(
        (finished(us.transport.read(end)).double() for end in range(us.size)),
        torch.zeros(WIDTH, device=us.device, dtype=torch.float64),
    )


def die_before(us: Processes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after_posting(us: Processes) -> None:
    count = us.transport.window(us.rank).numel()
    us.transport.all_reduce([us.value(us.rank, count, 20, torch.float32)], range(us.size))
    os.kill(os.getpid(), signal.SIGKILL)


def die_behind(us: Processes) -> None:
    """With a value posted that the GPU will never write."""
    if us.device.type == "cuda":
        torch.cuda._sleep(4_000_000_000)  # pyright: ignore[reportPrivateUsage]
    die_after_posting(us)


def die_busy(us: Processes) -> None:
    """With much asked of the GPU that will never be done, under a window's lock and without."""
    own = us.transport.window(us.rank)
    with us.transport.guard(us.rank):
        for _ in range(2000):
            own.add_(1.0)
    pending = us.transport.average(us.rank, 0)
    for _ in range(2000):
        own.mul_(1.0)
    assert pending.done
    os.kill(os.getpid(), signal.SIGKILL)


DEATHS: dict[str, Callable[[Processes], None]] = {
    "die_before": die_before, "die_after_posting": die_after_posting, "die_behind": die_behind,
    "die_busy": die_busy,
}  # fmt: skip


def survive(device: torch.device, how: str) -> dict[str, Any]:
    """One process is killed; the others get the same mean, of all or of the rest, and go on."""
    large = LARGE[device.type]
    us = Processes(device, large)
    everybody = list(range(us.size))
    rest = [rank for rank in everybody if rank != VICTIM]
    for number in range(20):
        us.reduce(large, number)
    us.meet()
    if us.rank == VICTIM:
        DEATHS[how](us)
    wrong, of_all, disagreed = 0, 0, 0
    began = time.perf_counter()
    for number in range(20, 60):
        mean = us.reduce(large, number)
        if torch.equal(mean, us.mean(everybody, large, number, torch.float32)):
            of_all += 1
        elif not torch.equal(mean, us.mean(rest, large, number, torch.float32)):
            wrong += 1
        digest = hashlib.sha256(mean.cpu().numpy().tobytes()).hexdigest()
        disagreed += us.transport.store.agree(f"round {number}", digest) != digest
    seconds = time.perf_counter() - began
    for end in rest:
        finished(us.transport.average(us.rank, end))
    until = time.monotonic() + 5.0
    while VICTIM not in us.ears.gone and time.monotonic() < until:
        time.sleep(0.01)
    us.meet()
    us.transport.close()
    return {
        "passed": wrong == 0 and disagreed == 0 and of_all <= 1 and us.ears.gone == [VICTIM],
        "wrong": wrong, "of_all": of_all, "disagreed": disagreed, "seconds": seconds,
        "torn_updates": us.transport.torn_updates,
    }  # fmt: skip


def train(device: torch.device, method: str) -> dict[str, Any]:
    """A loop of each method: everybody ends with the same model, and it has learned something."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    inputs = torch.randn(512, 64, device=device)
    targets = inputs[:, :10].argmax(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def loss() -> Tensor:
        return nn.functional.cross_entropy(module(inputs), targets)

    before = loss().item()
    rank = discover().rank
    with gossamer.join(module, optimizer, method, seed=0, steps=STEPS) as worker:
        coupling = worker.coupling
        assert coupling is not None
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss().backward()
            worker.step()
        summary = coupling.session.summary()
    after = loss().item()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    digest = hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()
    return {
        "passed": after < before, "digest": digest, "rank": rank, "loss": [before, after],
        "summary": {key: value for key, value in summary.items() if isinstance(value, int | float)},
    }  # fmt: skip


def main() -> None:
    case, device, folder = sys.argv[1], torch.device(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    name, _, detail = case.partition("/")
    works: dict[str, Callable[[], dict[str, Any]]] = {
        "reduce": lambda: reduce(device), "windows": lambda: windows(device),
        "averages": lambda: averages(device, LARGE[device.type] if detail == "large" else WIDTH),
        "survive": lambda: survive(device, detail), "train": lambda: train(device, detail),
    }  # fmt: skip
    try:
        found = works[name]()
    except Exception:
        found = {"passed": False, "error": traceback.format_exc()[-2000:]}
    (folder / f"{discover().rank}.json").write_text(json.dumps(found))
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
