"""Speed of stages and of islands on this machine, each beside what it is measured against.

    python benchmarks/stages.py                 # stages: plain, by hand, ours, three rounds
    python benchmarks/stages.py islands         # FSDP2 alone, and with diloco between islands

Stages: one model of equal layers, by `gossamer train` on one process (plain) and as two stages of
GPipe, and by PyTorch's pipelining runtime called by hand over Gloo. With M micro-batches two stages
should take (M + 1) / (2 M) of a plain step, where each process has a core of its own.

Islands: four processes, FSDP2 over two and two; alone, and coupled by `diloco` at period 16.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import gossamer
from gossamer import Task, train

WIDTH, LAYERS, BATCH, MICROBATCHES, STEPS, ROUNDS = 384, 8, 256, 8, 40, 3
OURS = f"all_reduce:stages=2,pipeline=gpipe,microbatches={MICROBATCHES}"
METHODS = {"plain": ("all_reduce", 1), "ours": (OURS, 2)}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    )


def data_of(samples: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.roll(1, 1)


task = Task.of(
    model_of, nn.functional.mse_loss, data_of(STEPS * BATCH), data_of(64), metric=None,
    name="equal layers", batch=BATCH, epochs=1, learning_rates=[0.01], optimiser="sgd",
)  # fmt: skip


def by_gossamer(what: str) -> float:
    """Seconds of a step."""
    method, workers = METHODS[what]
    done = train(task, method, workers, evaluations=1).summary
    return done["wall_seconds"] / done["steps"]


def by_hand(rank: int, meeting: str, answers: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    half = LAYERS // 2
    module = model_of()[rank * half : (rank + 1) * half]
    example = torch.empty(BATCH // MICROBATCHES, WIDTH, requires_grad=rank > 0)
    stage = PipelineStage(
        module, rank, 2, torch.device("cpu"), input_args=example,
        output_args=torch.empty(BATCH // MICROBATCHES, WIDTH, requires_grad=True),
    )  # fmt: skip
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    inputs, targets = data_of(STEPS * BATCH)
    began = 0.0
    for step in range(STEPS):
        if step == 1:
            began = time.perf_counter()
        part = slice(step * BATCH, (step + 1) * BATCH)
        optimizer.zero_grad()
        if rank:
            schedule.step(target=targets[part], losses=[])
        else:
            schedule.step(inputs[part])
        optimizer.step()
    if rank == 0:
        Path(answers).write_text(str((time.perf_counter() - began) / (STEPS - 1)))
    dist.barrier()
    dist.destroy_process_group()


def measured_by_hand() -> float:
    with tempfile.TemporaryDirectory() as place:
        arguments = (f"{place}/meeting", f"{place}/answer")
        torch.multiprocessing.spawn(by_hand, arguments, nprocs=2)
        return float(Path(arguments[1]).read_text())


def stages() -> None:
    found: dict[str, list[float]] = {"plain": [], "by hand": [], "ours": []}
    for _ in range(ROUNDS):
        found["plain"].append(by_gossamer("plain"))
        found["by hand"].append(measured_by_hand())
        found["ours"].append(by_gossamer("ours"))
    middle = {what: statistics.median(times) for what, times in found.items()}
    ideal = middle["plain"] * (MICROBATCHES + 1) / (2 * MICROBATCHES)
    for what, times in found.items():
        rounds = " ".join(f"{1e3 * one:.1f}" for one in times)
        print(f"{what:8} {1e3 * middle[what]:7.1f} ms a step   (rounds: {rounds})")
    print(f"ideal    {1e3 * ideal:7.1f} ms: half of the work and the bubble")
    for what, against in (("the ideal", ideal), ("by hand", middle["by hand"])):
        print(f"ours takes {middle['ours'] / against:.2f} of {what}")


def island() -> None:
    """One process of four: FSDP2 over two of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, size = gossamer.rank(), gossamer.size()
    torch.set_num_threads(1)
    meeting = os.environ["PIPELINES_MEETING"]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    shard = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("island", "shard"))["shard"]
    model = model_of()
    for layer in model:
        fully_shard(layer, mesh=shard)
    fully_shard(model, mesh=shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = data_of(BATCH)

    def loop(step: Callable[[], object]) -> float:
        began = 0.0
        for number in range(STEPS + 8):
            if number == 8:
                began = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            step()
        return (time.perf_counter() - began) / STEPS

    alone = loop(optimizer.step)
    with gossamer.join(model, optimizer, mesh=shard, steps=STEPS) as worker:
        coupled = loop(worker.step)
    again = loop(optimizer.step)
    if rank == 0:
        share = (alone + again) / 2 / coupled
        times = " ".join(f"{1e3 * one:.1f}" for one in (alone, coupled, again))
        print(f"alone, with diloco, alone: {times} ms a step; {share:.2f} of the speed")
    dist.barrier()
    dist.destroy_process_group()


def islands() -> None:
    command = [sys.executable, "-m", "gossamer", "run", "-n", "4", "--method", "diloco:period=16"]
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as place:
            own = {**os.environ, "PIPELINES_MEETING": f"{place}/meeting"}
            subprocess.run([*command, sys.executable, __file__, "island"], env=own, check=True)


if __name__ == "__main__":
    {"island": island, "islands": islands}.get((sys.argv[1:] or [""])[0], stages)()
