"""Gossip: pull, push, push-sum and NoLoCo. Nobody waits for everybody."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.methods.neighbourhood import Neighbourhood
from gossamer.payload import payload
from gossamer.pending import Pending
from gossamer.replica import Replica
from gossamer.rules import mean_in_order
from gossamer.topology import paired
from gossamer.worker import Message, Worker


async def pull_gossip(w: Worker, x: Replica, *, beta: float = 0.5, period: int = 1) -> None:
    """Jin et al. 2016, Algorithm 3. Promises: no peer takes part; the mean is NOT kept."""
    for t in w.steps():
        if t > 0 and t % period == 0 and w.peers:
            try:
                x.mix_(await w.read(w.rng.choice(w.peers)), beta)  # x_i <- (x_i + x_j) / 2
            except PeerLost:
                pass  # its death was not known when it was drawn: this round has no partner
        x.descend_(await w.gradient(x))


async def push_gossip(w: Worker, x: Replica, *, period: int = 1) -> None:
    """Jin et al. 2016, Algorithm 4. Promises: nobody waits; the mean is NOT kept."""
    for t in w.steps():
        if t > 0 and t % period == 0 and w.peers:
            mine = x.snapshot()
            w.send(w.rng.choice(w.peers), mine, tag="model")
            models = [message.payload for message in w.collect("model")]
            x.assign_(mean_in_order([mine, *models]))  # all received since the last round
        x.descend_(await w.gradient(x))


@payload
@dataclass(frozen=True, slots=True)
class Share:
    """Part of a worker's mass: p_ji x_i and p_ji w_i."""

    numerator: Tensor
    weight: float


async def push_sum(
    w: Worker, x: Replica, *, topology: str = "one_peer_exponential", overlap: int = 0
) -> None:
    """Assran et al. 2019, SGP; with `overlap` of tau steps Overlap-SGP (line 22 corrected).

    Promises: the sum of numerators and the sum of weights are kept (messages on their way
    included); a step waits for its in-neighbours, or only for messages older than tau.
    """
    graph = Neighbourhood(topology, w)
    inbox: list[tuple[int, Pending[Message]]] = []

    def keep(message: Message) -> None:
        if message.payload is not None:
            x.add_(message.payload.numerator)
            x.weight += message.payload.weight

    for t in w.steps():
        point = None if x.weight == 1.0 else x.snapshot() / x.weight  # z_i = x_i / w_i
        grad = await w.gradient(x if point is None else point)
        x.descend_(grad, at=point)  # gradient and decay of z_i move the biased numerator
        now = graph.among(w.live_at(t))
        peers = now.out_neighbours(w.rank, t)
        # Mass sent to an unreachable worker would be lost. It is sent None instead, because it may
        # be reached again and would wait for the message.
        targets = [peer for peer in peers if peer in w.live]
        share = 1.0 / (len(targets) + 1)
        mine, weight = x.snapshot(), x.weight
        for peer in peers:
            mass = Share(mine * share, weight * share) if peer in targets else None
            w.send(peer, mass, tag=("share", t))
        x.add_(mine, -share * len(targets))  # what stays is the own share p_ii
        x.weight = weight - weight * share * len(targets)
        for peer in now.in_neighbours(w.rank, t):
            inbox.append((t, w.receive(("share", t), source=peer)))
        due = [entry for entry in inbox if entry[1].done or entry[0] <= t - overlap]
        inbox = [entry for entry in inbox if entry not in due]
        for _, pending in due:
            try:
                keep(await pending)  # w <- w + p w: accumulated, never overwritten
            except PeerLost:
                pass  # its mass is lost, and the summary reports how much
    for _, pending in inbox:
        try:
            keep(await pending)
        except PeerLost:
            pass


async def noloco(
    w: Worker, x: Replica, *, period: int = 8, outer_rate: float = 0.7, outer_momentum: float = 0.5
) -> None:
    """Kolehmainen et al. 2025, NoLoCo: local steps, then an outer step with one random partner.

    v <- a v + b (mean of the pair's models - phi), phi <- phi + v, x <- phi. Promises: the mean of
    phi is that of heavy-ball momentum on the mean displacement; a step waits for one partner. As in
    the published runs b stands for both of the paper's rates, so a model is all that travels.
    """
    phi = x.memory.setdefault("start", x.snapshot())
    velocity = x.memory.setdefault("velocity", torch.zeros_like(phi))
    for t in w.steps():
        x.descend_(await w.gradient(x))
        if (t + 1) % period == 0:
            velocity.mul_(outer_momentum)
            velocity.add_(await _mean_of_pair(w, x.snapshot(), t) - phi, alpha=outer_rate)
            x.assign_(phi.add_(velocity))


async def _mean_of_pair(w: Worker, mine: Tensor, t: int) -> Tensor:
    """The mean of this worker's model and its partner's; its own if there is none."""
    partner = paired(w.live_at(t), t).get(w.rank)
    if partner is None:
        return mine
    w.send(partner, mine, tag=("model", t))
    try:
        theirs = (await w.receive(("model", t), source=partner)).payload
    except PeerLost:
        return mine
    return mean_in_order([mine, theirs] if w.rank < partner else [theirs, mine])
