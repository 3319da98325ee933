"""Elastic averaging: workers and a centre pull at each other."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.methods.shards import Shards
from gossamer.replica import Replica
from gossamer.rules import elastic_pull
from gossamer.worker import Worker


async def easgd(
    w: Worker, x: Replica, *, alpha: float = 0.1, period: int = 1, synchronous: bool = False
) -> None:
    """Zhang, Choromanska & LeCun 2015, EASGD.

    Promises: only gradients change the sum of workers and centre, even with a stale read; a worker
    waits for one read of the centre (`synchronous`: for everyone). The gradient is taken at the
    point before the elastic pull.
    """
    centre = Shards(w)
    for t in w.steps():
        point = x.memory.pop("point", None)
        if point is None:  # otherwise the step was begun before a checkpoint
            point = x.snapshot()  # x <- x_i
            if t % period == 0:  # if tau divides t_i
                await _exchange(w, x, centre, point, alpha, synchronous)
        x.descend_(await _gradient(w, x, point), at=point)  # x_i <- x_i - eta g(x)


async def eamsgd(
    w: Worker,
    x: Replica,
    *,
    alpha: float = 0.1,
    period: int = 1,
    delta: float = 0.9,
    synchronous: bool = False,
) -> None:
    """Zhang, Choromanska & LeCun 2015, EAMSGD: elastic averaging with Nesterov's momentum.

    It has its own momentum (delta), so it takes only the learning rate and the weight decay from
    the run's optimiser. The weight decay is an L2 penalty, whose gradient is taken at the same
    point as that of the loss.
    """
    centre = Shards(w)
    velocity = x.memory.setdefault("velocity", torch.zeros_like(x.snapshot()))
    for t in w.steps():
        point = x.memory.pop("point", None)
        if point is None:
            point = x.snapshot()
            if t % period == 0:
                await _exchange(w, x, centre, point, alpha, synchronous)
            point.add_(velocity, alpha=delta)
        grad = x.penalised(await _gradient(w, x, point), point)  # g(x + delta v)
        velocity.mul_(delta).add_(grad, alpha=-x.learning_rate)  # v <- delta v - eta g
        x.add_(velocity)  # the elastic step is not part of v
        w.observe("update")


async def _gradient(w: Worker, x: Replica, point: Tensor) -> Tensor:
    """In a user's loop a checkpoint is taken while the gradient is awaited. The exchange has been
    made then, and only the memory has the point."""
    x.memory["point"] = point
    gradient = await w.gradient(point)
    del x.memory["point"]
    return gradient


async def _exchange(
    w: Worker, x: Replica, centre: Shards, point: Tensor, alpha: float, synchronous: bool
) -> None:
    """x_i <- x_i - e and centre <- centre + e with e = alpha (x - centre)."""
    pull = elastic_pull(point, torch.cat(await centre.read()), alpha)
    if synchronous:
        # Everyone has read before anyone adds: all right-hand sides are values of time t.
        await w.all_reduce(pull[:1])
    x.add_(pull, -1.0)
    moved = centre.accumulate(pull)
    if synchronous:
        await moved
        await w.all_reduce(pull[:1])
