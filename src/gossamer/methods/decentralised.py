"""Averaging with neighbours: D-PSGD in step, AD-PSGD out of step."""

from __future__ import annotations

from math import inf

from gossamer.errors import PeerLost
from gossamer.methods.neighbourhood import Neighbourhood, exchange, mix
from gossamer.replica import Replica
from gossamer.worker import Worker


async def d_psgd(
    w: Worker, x: Replica, *, topology: str = "ring", overlap: bool = True, adapt: str = "after"
) -> None:
    """Lian et al. 2017, D-PSGD: x_i <- sum_j W_ij x_j - eta g_i(x_i).

    Promises: only the gradients move the mean; a step waits for the neighbours. With `overlap` the
    exchange runs while the gradient is computed at the un-mixed x_i; the weight decay is taken
    there, too. `adapt=before` mixes x_j - eta g_j instead (adapt then combine) and cannot overlap.
    """
    graph = Neighbourhood(topology, w)
    for t in w.steps():
        now = graph.among(w.live_at(t))
        if adapt == "before":
            x.descend_(await w.gradient(x))
            await mix(w, x, now, t, exchange(w, x.snapshot(), now, t))
            continue
        mine = x.snapshot()
        if overlap:
            inbox = exchange(w, mine, now, t)
            grad = await w.gradient(x)
        else:
            grad = await w.gradient(x)
            inbox = exchange(w, mine, now, t)
        await mix(w, x, now, t, inbox)
        x.descend_(grad, at=mine if inbox else None)


async def ad_psgd(
    w: Worker, x: Replica, *, topology: str = "complete", least: float = 1.0, most: float = 1.0
) -> None:
    """Lian et al. 2018, AD-PSGD: a training loop and an averaging loop share x.

    On a bipartite graph active workers average with passive ones; on any other graph every worker
    is active. Promises: the mean is kept under every race, because both ends add deltas; nobody
    waits for a slow worker. An active worker averages at least `least` and at most `most` times per
    step, and training is at most one step ahead. The paper's loops run freely (0 and inf).
    """
    graph = Neighbourhood(topology, w)

    def is_active() -> bool:
        sides = graph.among(w.live).sides  # after a death the survivors take sides anew
        return sides is None or w.rank in sides[0]

    async def train() -> None:
        steps = averaged = 0
        for _ in w.steps():
            averaged += len(w.collect("averaged"))
            while is_active() and averaged < least * (steps - 1):
                await w.receive("averaged")
                averaged += 1
            x.descend_(await w.gradient(x))
            if is_active():
                w.send(w.rank, None, tag="stepped")
                steps += 1

    async def average() -> None:
        steps = averaged = 0
        while not w.over:
            steps += len(w.collect("stepped"))
            while averaged >= steps * most or steps == 0:
                await w.receive("stepped")
                steps += 1
            peers = w.answering(graph.among(w.live).neighbours(w.rank))
            if peers:
                try:
                    await w.average(w.rng.choice(peers))  # x_i, x_j <- (x_i + x_j) / 2, atomically
                except PeerLost:
                    pass  # w.live has shrunk, so the next peer is another one
            elif most == inf:
                await w.receive("stepped")  # no peer is left, and a free loop must let time pass
            averaged += 1
            w.send(w.rank, None, tag="averaged")

    await w.together(train(), average())
