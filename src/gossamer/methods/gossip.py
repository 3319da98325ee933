"""Gossip: pull, push, push-sum and NoLoCo; and workers that train apart and look at each other now
and then: codistillation and population based training. Nobody waits for everybody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError, PeerLost, unknown_name
from gossamer.methods.neighbourhood import Neighbourhood
from gossamer.payload import payload
from gossamer.pending import Pending
from gossamer.replica import SCORE, Replica, score_of
from gossamer.rules import mean_in_order
from gossamer.topology import paired
from gossamer.worker import Gradient, Lesson, Message, Worker


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


# ---------------------------------------------------------------------- apart, and looking


async def codistill(
    w: Worker, x: Replica, *, weight: float = 1.0, period: int = 50, teachers: int = 1,
    burn_in: float = 0.1,
) -> None:  # fmt: skip
    """Anil et al. 2018: workers train apart, and each learns what others predict for its batches.

    Once a period a worker reads the models of so many others, and until the next time adds `weight`
    times the loss against their mean prediction to its own. In the first part of the run, the share
    `burn_in`, they predict nothing worth learning. Promises: models are never mixed.
    """
    begins = ceil(burn_in * w.expected_steps)
    lesson: Lesson | None = None
    for t in w.steps():
        if t >= begins and (t - begins) % period == 0 and w.peers:
            chosen = w.rng.sample(list(w.peers), min(teachers, len(w.peers)))
            lesson = None  # the old models are not held beside the new ones
            lesson = await _read_teachers(w, chosen, weight)
        gradient = w.gradient(x, lesson=lesson)
        x.descend_(await gradient)
        _follow_loss(x, gradient, period)


async def _read_teachers(w: Worker, peers: Sequence[int], weight: float) -> Lesson | None:
    """The models of those that are alive; nothing where nobody is."""
    models: list[Tensor] = []
    for reading in [w.read(peer) for peer in peers]:
        try:
            models.append(await reading)
        except PeerLost:
            pass  # its death was not known when it was drawn
    return Lesson(models, weight) if models else None


def _follow_loss(x: Replica, gradient: Gradient, period: int) -> None:
    """A worker's score is the mean loss of about the last `period` steps."""
    if gradient.loss is None:
        return
    loss = gradient.loss.detach().reshape(1).nan_to_num(nan=inf)
    known = x.memory.get(SCORE)
    x.memory[SCORE] = loss.clone() if known is None else known.lerp(loss, 1.0 / period)


@payload
@dataclass(frozen=True, slots=True)
class Rival:
    """A member of a population asks for a better one's model, and says what its own is worth."""

    score: float


@payload
@dataclass(frozen=True, slots=True)
class Elite:
    """A better member's model, what it is worth, and its factors of the hyper-parameters."""

    model: Tensor
    score: float
    factors: Tensor
    life: int
    """How often it had copied another one before."""


async def pbt(
    w: Worker, x: Replica, *, period: int = 50, tune: str = "all", spread: float = 3.0,
    change: float = 0.2,
) -> None:  # fmt: skip
    """Jaderberg et al. 2017, population based training, with nobody in the centre.

    Every worker but the first begins with hyper-parameters up to `spread` times larger or smaller.
    Once a period it asks another one, which sends its model and settings if its loss of late is
    lower; these are copied, and each setting changed by the share `change`, up or down. `tune` is
    all, or names as in learning_rate/momentum. Promises: nobody waits; the best is never lost.
    """
    names = _names_to_tune(tune, x.tunable)
    factors = x.memory.setdefault("factors", _first_factors(w, len(names), spread))
    life = x.memory.setdefault("life", torch.zeros(1, dtype=torch.int64))

    def take(source: int, its_life: int, new: Tensor) -> None:
        factors.copy_(new)
        w.observe("copied from", source)
        w.observe("in its life", its_life)
        for name, factor in zip(names, factors.tolist(), strict=True):
            w.observe(f"factor of {name}", factor)
        x.tune_(dict(zip(names, factors.tolist(), strict=True)))

    take(w.rank, int(life), factors)
    for t in w.steps():
        gradient = w.gradient(x)
        x.descend_(await gradient)
        _follow_loss(x, gradient, period)
        for asked in w.collect("rival"):
            mine = score_of(x.memory)
            if asked.source in w.live and _is_better(mine, asked.payload.score):
                elite = Elite(x.snapshot(), mine, factors.clone(), int(life))
                w.send(asked.source, elite, tag="elite")
        answers = w.collect("elite")
        best = min(answers, key=lambda answer: answer.payload.score, default=None)
        if best is not None and _is_better(best.payload.score, score_of(x.memory)):
            elite = best.payload
            x.assign_(elite.model)
            x.reset_optimiser_()
            if elite.score < inf:
                x.memory[SCORE] = torch.full((1,), elite.score)
            up_or_down = [w.rng.choice((1.0 - change, 1.0 + change)) for _ in names]
            life += 1
            take(best.source, elite.life, elite.factors * torch.tensor(up_or_down))
        if (t + 1) % period == 0 and w.peers:
            w.send(w.rng.choice(w.peers), Rival(score_of(x.memory)), tag="rival")


def _is_better(one: float, other: float) -> bool:
    """Where no losses are computed every answer is a model, which is the most that can travel."""
    return one < other or one == other == inf


def _names_to_tune(asked: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(known) if asked == "all" else tuple(asked.split("/"))
    for name in names:
        if name not in known:
            raise unknown_name("pbt tune", name, ["all", *known])
    if len(set(names)) < len(names):
        raise ConfigurationError(f"pbt: tune={asked} names something twice; name each once")
    return names


def _first_factors(w: Worker, count: int, spread: float) -> Tensor:
    """Even in the logarithm; the first worker has the settings of the user."""
    drawn = [spread ** w.rng.uniform(-1.0, 1.0) for _ in range(count)]
    return torch.tensor([1.0] * count if w.rank == 0 else drawn)
