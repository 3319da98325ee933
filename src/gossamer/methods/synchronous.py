"""Synchronous SGD by all-reduce, where everyone waits for everyone; and no coupling at all."""

from __future__ import annotations

from math import ceil

from torch import Tensor

from gossamer.pending import Pending, gather
from gossamer.replica import Replica
from gossamer.rules import join_buckets
from gossamer.worker import Worker


async def all_reduce(w: Worker, x: Replica, *, overlap: bool = True, stale: int = 0) -> None:
    """Jin et al. 2016, Algorithm 1; overlapped with backward as PyTorch's DDP does it.

    Promises: all replicas are equal after every step. `stale=1` is the stale-synchronous form: a
    step applies the mean gradient of the step before, so that reducing overlaps with computing.
    """
    on_the_way: list[tuple[int, Pending[list[Tensor]]]] = [
        (max(0, int(name.removeprefix("sent ")) - stale), gather([w.all_reduce(sent)]))
        for name, sent in x.memory.items()
        if name.startswith("sent ")
    ]
    for t in w.steps():
        read, gradient = x.version, w.gradient(x)
        if overlap:
            buckets = [w.all_reduce(await bucket) for bucket in gradient.buckets()]
            await gradient
        else:
            buckets = [w.all_reduce(await gradient)]
        on_the_way.append((read, gather(buckets)))
        if stale:
            x.memory[f"sent {t}"] = (await gradient).clone()  # again, if the run is resumed
            x.memory.pop(f"sent {t - stale}", None)
        if len(on_the_way) > stale:
            read, mean = on_the_way.pop(0)
            x.descend_(join_buckets(await mean), read=read)  # x(t+1) = x(t) + d(t)
    for read, mean in on_the_way:
        x.descend_(join_buckets(await mean), read=read)
    for name in [name for name in x.memory if name.startswith("sent ")]:
        del x.memory[name]  # all of them have been applied


async def ensemble(w: Worker, x: Replica, *, shared: float = 0.0) -> None:
    """Ben-Nun & Hoefler 2019: models that never meet; their predictions are averaged.

    In the first part of the run, the share `shared`, they are one model trained by all (the seed
    phase of branch-train-merge, Li et al. 2022): members with a common past can be averaged.
    """
    apart_from = ceil(shared * w.expected_steps)
    for t in w.steps():
        gradient = await w.gradient(x)
        x.descend_(await w.all_reduce(gradient) if t < apart_from else gradient)
