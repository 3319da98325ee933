"""Averaging with neighbours where the workers' data differ.

D-PSGD then comes to rest away from the optimum, because each worker's gradient pulls to its own
optimum while its model is mixed with few others. Each of these methods removes that error: it
tracks the mean gradient, cancels the pull of the worker's own data, keeps the momentum of all, or
relays every model to every worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.methods.neighbourhood import Inbox, Neighbourhood, exchange, mix, shares_of
from gossamer.payload import payload
from gossamer.replica import Replica, forget
from gossamer.rules import weighted_sum
from gossamer.topology import Topology
from gossamer.worker import Worker


@payload
@dataclass(frozen=True, slots=True)
class Tracked:
    """A worker's model and the direction in which it believes that all descend."""

    model: Tensor
    direction: Tensor


async def gradient_tracking(w: Worker, x: Replica, *, topology: str = "ring") -> None:
    """Pu & Nedic 2021, DSGT: x <- W x - eta q, then q <- W q + g(x_new) - g(x_old).

    Promises: the mean of all q is the mean of all gradients at every step, and only the q move the
    mean. The exchange runs while the gradient is computed. When the set of the living changes,
    tracking begins anew, because the q of the dead is lost.
    """
    graph = Neighbourhood(topology, w)
    for t in w.steps():
        now = graph.among(w.live_at(t))
        if graph.has_changed:
            forget(x.memory)
        if len(now.members) == 1:
            x.descend_(await w.gradient(x))
            continue
        at = x.snapshot()
        sent = Tracked(at, x.memory.get("direction", torch.zeros_like(at)))
        inbox = exchange(w, sent, now, t)
        await _track(w, x, now, t, inbox, sent, await w.gradient(x))


async def _track(
    w: Worker, x: Replica, graph: Topology, t: int, inbox: Inbox, sent: Tracked, grad: Tensor
) -> None:
    """q <- W q + g - g_old, and x <- W x - eta q. (What a step needs no more, it does not hold.)"""
    shares = await shares_of(w, graph, t, inbox, sent)
    direction = weighted_sum([(share, theirs.direction) for share, theirs in shares]).add_(grad)
    if "gradient" in x.memory:
        direction.sub_(x.memory["gradient"])
    x.memory["gradient"], x.memory["direction"] = grad.clone(), direction
    x.assign_(weighted_sum([(share, theirs.model) for share, theirs in shares]))
    x.descend_(direction.clone(), at=sent.model)


async def d2(w: Worker, x: Replica, *, topology: str = "ring") -> None:
    """Tang et al. 2018, D2: x <- W (2 x - x_old - eta g(x) + eta g(x_old)), at first W (x - eta g).

    Promises: the mean of the models follows plain SGD. W gets as much of the identity as makes it
    positive semi-definite, because the recursion diverges for eigenvalues below -1/3. Any inner
    optimiser takes the place of eta g. After a death the recursion begins anew.
    """
    graph = Neighbourhood(topology, w)
    for t in w.steps():
        now = graph.among(w.live_at(t))
        if graph.has_changed:
            forget(x.memory)
        before = x.snapshot()
        x.descend_(await w.gradient(x))
        if len(now.members) > 1:
            await _correct(w, x, now, t, before)


async def _correct(w: Worker, x: Replica, graph: Topology, t: int, before: Tensor) -> None:
    after = x.snapshot()  # x - eta g
    last = x.memory.get("after", before)  # x_old - eta g(x_old)
    ahead = after + before - last
    x.memory["after"] = after
    shares = await shares_of(w, graph, t, exchange(w, ahead, graph, t), ahead)
    lowest = min(0.0, graph.least_eigenvalue)
    x.assign_(weighted_sum(shares).lerp_(ahead, lowest / (lowest - 1.0)))


async def qg_dsgdm(
    w: Worker, x: Replica, *, topology: str = "ring", beta: float = 0.9, mu: float = 0.9
) -> None:
    """Lin et al. 2021, QG-DSGDm: D-PSGD with the momentum of the mixed models.

    x <- W (x - eta (g + beta m)), then m <- mu m + (1 - mu) (x_old - x_new) / eta. A local momentum
    gathers what the own data alone say; this one follows the way that the neighbours go together.
    Promises: only gradients and their momentum move the mean.
    """
    graph = Neighbourhood(topology, w)
    velocity = x.memory.setdefault("velocity", torch.zeros_like(x.snapshot()))
    for t in w.steps():
        now, rate = graph.among(w.live_at(t)), x.learning_rate
        before = x.snapshot()
        grad = x.penalised(await w.gradient(x), before)
        x.add_(grad.add(velocity, alpha=beta), -rate)
        w.observe("update")
        await mix(w, x, now, t, exchange(w, x.snapshot(), now, t))
        if rate:
            velocity.mul_(mu).add_(before.sub_(x.snapshot()), alpha=(1 - mu) / rate)


@payload
@dataclass(frozen=True, slots=True)
class Relayed:
    """The sum of the models on one side of a link, and how many they are."""

    total: Tensor
    count: int


async def relay_sgd(w: Worker, x: Replica, *, topology: str = "binary_tree") -> None:
    """Vogels et al. 2021, RelaySGD: on a tree, what came from one side is passed on to the other.

    x_i <- the mean over all j of the model that j had before as many rounds as it is hops away. So
    the averaging is uniform on any tree. Promises: a step waits for the neighbours. Until n models
    have been heard of, and while some cannot be heard, the own one stands for them. The mean of
    the models is not kept, because old ones count, too.
    """
    graph = Neighbourhood(topology, w)
    for t in w.steps():
        now = graph.among(w.live_at(t))
        if graph.has_changed:
            forget(x.memory)  # the sums have the models of the dead, and other sides
        x.descend_(await w.gradient(x))
        if len(now.members) > 1:
            await _relay(w, x, now, t)


async def _relay(w: Worker, x: Replica, tree: Topology, t: int) -> None:
    peers, size, mine = tree.neighbours(w.rank), len(tree.members), x.snapshot()
    heard = _heard(x, peers)
    for peer in peers:
        others = [heard[other] for other in peers if other != peer and other in heard]
        total = weighted_sum([(1.0, mine), *((1.0, other.total) for other in others)])
        relayed = Relayed(total, 1 + sum(other.count for other in others))
        w.send(peer, relayed, tag=("relay", t))
    inbox = [(peer, w.receive(("relay", t), source=peer)) for peer in peers]
    forget(x.memory)
    for peer, pending in inbox:
        try:
            theirs: Relayed = (await pending).payload
            x.memory[f"total {peer}"] = theirs.total
            x.memory[f"count {peer}"] = torch.tensor(theirs.count)
        except PeerLost:
            pass  # its side is not heard of in this round
    heard = _heard(x, peers)
    missing = size - 1 - sum(side.count for side in heard.values())
    sides = [(1 / size, side.total) for side in heard.values()]
    x.assign_(weighted_sum([((1 + missing) / size, mine), *sides]))


def _heard(x: Replica, peers: Sequence[int]) -> dict[int, Relayed]:
    """What the last round brought from each neighbour, kept where checkpoints find it."""
    return {
        peer: Relayed(x.memory[f"total {peer}"], int(x.memory[f"count {peer}"]))
        for peer in peers
        if f"total {peer}" in x.memory
    }
