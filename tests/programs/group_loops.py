"""A user's loop with `groups=`, on forked processes; prints JSON.

    python tests/programs/group_loops.py '[["case_of_training", 4, "all_reduce:groups=2"]]'

They are started as those of `join_groups.py`, with the cases of this file.
"""

from __future__ import annotations

import os
import signal

import torch

import gossamer
import join_groups
from gossamer.errors import PeerLost
from join_cases import STEPS, assert_close, batch, digest, loss_of, net, plain, train


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def case_of_training(rank: int) -> dict[str, object]:
    model = net(rank)
    with gossamer.join(model, _optimizer(model)) as worker:
        train(worker)
    return {"digest": digest(model), "steps": worker.coupling.session.metrics.steps}


def case_of_one_big_worker(rank: int) -> dict[str, object]:
    """Whatever averages exactly between groups, too, is one process on everybody's batches."""
    model, alone = net(rank), net(0)
    with gossamer.join(model, _optimizer(model)) as worker:
        train(worker)
    plain(alone, _optimizer(alone), worker.size)
    assert_close(model, alone)
    return {"digest": digest(model)}


def case_of_one_point(rank: int) -> dict[str, object]:
    """In front of each backward pass the members of a group hold the same parameters."""
    model = net(rank)
    points = []
    with gossamer.join(model, _optimizer(model)) as worker:
        for step in range(STEPS):
            points.append(digest(model))
            worker.optimizer.zero_grad()
            loss_of(model, *batch(rank, step)).backward()
            worker.step()
    return {"points": points, "digest": digest(model)}


def case_of_shards(rank: int) -> dict[str, object]:
    """Each batch is a step, so a group whose members got unequal numbers would stand still."""
    model = net(rank)
    with gossamer.join(model, _optimizer(model)) as worker:
        taken = []
        for number in worker.shard([torch.tensor(i) for i in range(37)]):
            taken.append(int(number))
            worker.optimizer.zero_grad()
            loss_of(model, *batch(rank, len(taken))).backward()
            worker.step()
    return {"taken": taken, "digest": digest(model)}


def case_of_a_dying_leader(rank: int) -> dict[str, object]:
    return _killed(rank, 2)


def case_of_a_dying_member(rank: int) -> dict[str, object]:
    return _killed(rank, 3)


def _killed(rank: int, victim: int) -> dict[str, object]:
    model = net(rank)
    try:
        with gossamer.join(model, _optimizer(model)) as worker:
            train(worker, 2)
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            train(worker, 6, 2)
    except PeerLost as lost:
        return {"said": str(lost), "finite": bool(model[0].weight.isfinite().all())}
    return {"digest": digest(model)}


if __name__ == "__main__":
    join_groups.main(globals())
