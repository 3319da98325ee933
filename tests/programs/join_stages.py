"""Loops over pipelines: each process trains one stage of its replica's model.

python tests/programs/join_stages.py '[["staged", 4, "all_reduce:stages=2"]]'
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gossamer
import join_groups

STEPS, BATCH = 10, 8


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(),
        nn.Linear(9, 3),
    )  # fmt: skip


def batches() -> list[tuple[Tensor, Tensor]]:
    """Enough for two replicas."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * STEPS, BATCH, 5, generator=generator)
    return [(one, one[:, :3].sin()) for one in inputs]


def staged(rank: int) -> dict[str, Any]:
    """Train a while; answer with the whole model at the end, the losses, and what a consensus in
    the middle was."""
    # What other ranks begin with does not count.
    model = model_of(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen, losses = torch.empty(0), []
    with gossamer.join(model, optimizer, steps=STEPS, example=batches()[0][0]) as worker:
        for step, (inputs, targets) in enumerate(worker.shard(batches())):
            loss = worker.through_stages(inputs, targets, nn.functional.mse_loss)
            losses.append(float(loss))
            worker.step()
            if step == STEPS // 2 - 1:
                with worker.consensus() as output:
                    seen = torch.cat([p.detach().reshape(-1) for p in output.parameters()])
    whole = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {"model": whole.tolist(), "seen": seen.tolist(), "losses": losses}


def resumed(rank: int) -> dict[str, Any]:
    """Half of the steps, with a checkpoint after them, or the other half from there."""
    model = model_of(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    folder = Path(os.environ["JOIN_FOLDER"]) / "checkpoints"
    half, data = STEPS // 2, batches()
    worker = gossamer.join(model, optimizer, steps=STEPS, example=data[0][0])
    try:
        first = half * worker.restore(folder)
    except gossamer.ConfigurationError as error:
        return {"refused": str(error)}
    with worker:
        for step in range(first, first + half):
            inputs, targets = data[2 * step + rank // 2]
            worker.through_stages(inputs, targets, nn.functional.mse_loss)
            worker.step()
        if not first:
            worker.save(folder, 1)
    whole = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {"model": whole.tolist()}


def dying(rank: int) -> str:
    """The second stage of the second replica ends without a word after some steps."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with gossamer.join(model, optimizer, steps=STEPS, example=batches()[0][0]) as worker:
            for step, (inputs, targets) in enumerate(worker.shard(batches())):
                if rank == 3 and step == 3:
                    os._exit(9)
                worker.through_stages(inputs, targets, nn.functional.mse_loss)
                worker.step()
    except gossamer.PeerLost as lost:
        return str(lost)
    return "finished"


def refused(rank: int) -> str:
    """What a loop cannot do, and why."""
    model: nn.Module = model_of()
    if "cut" in os.environ["GOSSAMER_METHOD"]:
        model = nn.Linear(5, 3)
    example = None if "gpipe" in os.environ["GOSSAMER_METHOD"] else batches()[0][0]
    try:
        gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1), example=example)
    except gossamer.ConfigurationError as error:
        return str(error)
    return "joined"


if __name__ == "__main__":
    join_groups.main({"staged": staged, "dying": dying, "resumed": resumed, "refused": refused})
