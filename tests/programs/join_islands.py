"""Loops whose model FSDP2 has sharded over two processes, coupled with those of other islands.

python tests/programs/join_islands.py '[["sharded", 4, "diloco:period=4"]]'
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import gossamer
import join_groups

STEPS, BATCH = 12, 8


def model_of(width: int = 7) -> nn.Sequential:
    """By default with layers that two processes cannot halve."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(BATCH, 5, generator=generator)
    return inputs, inputs[:, :3].sin()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, targets = batch_of(rank, step)
    return nn.functional.mse_loss(model(inputs), targets)


def sharded(rank: int) -> dict[str, Any]:
    """Train a while; answer with the whole model, and with the loss of the output model."""
    size = gossamer.size()
    meeting = Path(os.environ["JOIN_FOLDER"]) / f"meeting-{os.environ['GOSSAMER_STORE'][-5:]}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("island", "shard"))
    model = model_of()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with gossamer.join(model, optimizer, mesh=mesh["shard"], steps=STEPS) as worker:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            worker.step()
        with worker.consensus():
            seen = float(loss_of(model, 0, 99).detach())
    whole = [p.full_tensor().reshape(-1) for p in model.parameters()]
    dist.barrier()
    dist.destroy_process_group()
    return {"model": torch.cat(whole).tolist(), "seen": seen}


def planned(rank: int) -> dict[str, Any]:
    """The same over layers that a plan of DTensors has split: an island sees one batch."""
    size = gossamer.size()
    meeting = Path(os.environ["JOIN_FOLDER"]) / f"meeting-{os.environ['GOSSAMER_STORE'][-5:]}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("island", "shard"))["shard"]
    model = model_of(width=8)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with gossamer.join(model, optimizer, mesh=mesh, steps=STEPS) as worker:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank // 2, step).backward()
            worker.step()
    whole = [p.full_tensor().reshape(-1) for p in model.parameters()]
    dist.barrier()
    dist.destroy_process_group()
    return {"model": torch.cat(whole).tolist()}


class OneProcess:
    """As much of a device mesh as says that every process is an island."""

    def __init__(self, rank: int) -> None:
        self.mesh = torch.tensor([rank])


def unsharded(rank: int) -> str:
    """What is refused, and why."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        gossamer.join(model, optimizer, mesh=OneProcess(rank))
    except gossamer.ConfigurationError as error:
        return str(error)
    return "joined"


if __name__ == "__main__":
    join_groups.main({"sharded": sharded, "planned": planned, "unsharded": unsharded})
