"""Methods that are made for compression: CHOCO-SGD's public copies, and 1-bit Adam."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from gossamer.compression.compressed_worker import CompressedWorker, encoding
from gossamer.errors import PeerLost
from gossamer.methods.neighbourhood import Neighbourhood, exchange
from gossamer.replica import Replica
from gossamer.topology import Topology
from gossamer.worker import Worker


async def choco_sgd(w: Worker, x: Replica, *, topology: str = "ring", gamma: float = 0.1) -> None:
    """Koloskova et al. 2019, CHOCO-SGD: neighbours know each other by copies that all can follow.

    x <- x - eta g;  q_i = Q(x_i - c_i) is sent;  c_j <- c_j + q_j for every neighbour and oneself;
    x_i <- x_i + gamma sum_j W_ij (c_j - c_i). What was not sent stays in x - c, so there is no
    other feedback. Promises: the mean is kept whatever the compressor loses. After a death the
    copies begin at zero again, as at the start.
    """
    graph, coder = Neighbourhood(topology, w), encoding(w)
    for t in w.steps():
        now = graph.among(w.live_at(t))
        if graph.has_changed:
            x.memory.pop("copy", None)
            x.memory.pop("copies", None)
        x.descend_(await w.gradient(x))
        if len(now.members) > 1:
            await _approach(w, x, coder, now, t, gamma)


async def _approach(
    w: Worker, x: Replica, coder: CompressedWorker, graph: Topology, t: int, gamma: float
) -> None:
    """One round; of the neighbours' copies only their weighted sum is kept."""
    mine = x.snapshot()
    copy = x.memory.setdefault("copy", torch.zeros_like(mine))  # c_i
    copies = x.memory.setdefault("copies", torch.zeros_like(mine))  # sum_j W_ij c_j
    data = await coder.encode(mine.sub_(copy))
    inbox, weights = exchange(w, data, graph, t), graph.weights(w.rank, t)
    own = await coder.decode(data)
    copy.add_(own)
    copies.add_(own, alpha=weights[w.rank])
    for peer, pending in inbox:
        try:
            theirs: Tensor = (await pending).payload
        except PeerLost:
            continue  # the next round is without it, and begins anew
        copies.add_(await coder.decode(theirs), alpha=weights[peer])
    x.add_(copies - copy, gamma)


async def one_bit_adam(
    w: Worker, x: Replica, *, warmup: float = 0.2, beta1: float = 0.9, beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> None:  # fmt: skip
    """Tang et al. 2021, 1-bit Adam: Adam for the share `warmup` of the steps, then compressed.

    From then on the variance v is frozen, and of each worker's momentum m what travels is
    m / sqrt(v), with error feedback; divided first, since one scale for all would drown small ones.
    Where v is zero there has never been a gradient, and a bit, which cannot say zero, is not
    believed. Adam is the method's own; it takes rate and weight decay from the run's SGD.
    """
    momentum = x.memory.setdefault("momentum", torch.zeros_like(x.snapshot()))
    square = x.memory.setdefault("square", torch.zeros_like(momentum))
    warm = max(1, ceil(warmup * w.expected_steps))
    for t in w.steps():
        grad = x.penalised(await w.gradient(x), x.snapshot())
        if t < warm:
            mean = await w.all_reduce(grad)
            momentum.lerp_(mean, 1 - beta1)
            square.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
            del mean
        # sqrt(v), corrected for its start at zero
        scale = (square / (1 - beta2 ** min(t + 1, warm))).sqrt_().add_(epsilon)
        if t >= warm:
            await _share_momentum(w, grad, momentum, scale, square > 0, beta1)
        x.add_(momentum / scale, -x.learning_rate / (1 - beta1 ** (t + 1)))
        w.observe("update")
        del scale


async def _share_momentum(
    w: Worker, grad: Tensor, momentum: Tensor, scale: Tensor, is_known: Tensor, beta1: float
) -> None:
    """m <- the mean of all beta m + (1 - beta) g, compressed after division by the scale."""
    own = momentum.lerp(grad, 1 - beta1).div_(scale).mul_(is_known)
    mean = await w.all_reduce(own, reference=own.new_zeros(()))
    momentum.copy_(mean).mul_(scale).mul_(is_known)
