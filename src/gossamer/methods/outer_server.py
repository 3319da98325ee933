"""Outer loops whose meeting is a server: nobody waits for a slow worker.

Asynchronous DiLoCo applies each displacement when it arrives. Decoupled DiLoCo merges what a quorum
and those who come a little later have sent, fragment by fragment, and workers never wait at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.errors import Late, RunOver
from gossamer.methods.outer import OuterModel, adopt_, due, own_copy
from gossamer.payload import payload
from gossamer.pending import gather
from gossamer.replica import Fragment, Replica, fragments_of
from gossamer.rules import DelayedNesterov, OuterOptimiser, radial_mean, weighted_sum
from gossamer.worker import INBOX, Left, Message, Worker

_INSTANT_S = 1e-6
"""Clocks are numbers with an end: what is due so soon is due."""


@payload
@dataclass(frozen=True, slots=True)
class PseudoGradient:
    """How far a worker has gone from the model that it was given (nothing: a first pull), the
    version of that model, and the worker's steps per second."""

    way: Tensor | None
    read: int
    speed: float


@payload
@dataclass(frozen=True, slots=True)
class Given:
    """A server's answer: its range of the model, the version, and after how many steps to come
    back."""

    value: Tensor
    version: int
    steps: int


async def async_diloco(w: Worker, x: Replica, *, period: int = 8) -> None:
    """Liu et al. 2024, asynchronous local SGD with delayed Nesterov: a worker's local steps.

    Promises: nobody waits for another worker. The server says how many steps to make, so that slow
    workers come back about as often as fast ones.
    """
    memory, versions, speed = x.memory, [0] * len(w.servers), 0.0

    async def exchange(way: Tensor | None) -> None:
        asked = [
            w.request(
                server, PseudoGradient(None if way is None else way[part], read, speed), tag=INBOX
            )
            for server, part, read in zip(w.servers, w.slices, versions, strict=True)
        ]
        given: list[Given] = await gather(asked)
        versions[:] = [one.version for one in given]
        memory["start"] = torch.cat([one.value for one in given])
        memory["left"] = torch.tensor(min(one.steps for one in given))
        x.assign_(memory["start"])

    if "start" not in memory:  # otherwise the steps were begun before a checkpoint
        await exchange(None)
    since, made = w.now(), 0
    try:
        for _ in w.steps():
            x.descend_(await w.gradient(x))
            made += 1
            memory["left"] -= 1
            if memory["left"] <= 0:
                speed = made / max(w.now() - since, 1e-9)
                await exchange(memory["start"] - x.snapshot())
                since, made = w.now(), 0
    except RunOver:
        pass  # the gradient is discarded, but the steps before it are still sent
    if made:
        await exchange(memory["start"] - x.snapshot())


async def delayed_nesterov_server(
    w: Worker, x: Replica, *, period: int = 8, outer_rate: float = 0.7, outer_momentum: float = 0.9,
    early: float = 0.0, dynamic: bool = True, fewest: int = 5, grace: float = 0.0,
) -> None:  # fmt: skip
    """Apply D / N of each displacement at once, and the momentum of N of them with the N-th.

    `early` is the part of the momentum that each of the others applies, at most 1 / N. With
    `dynamic`, a worker of speed v makes H v / max v steps, to the nearest, at least `fewest`: each
    comes back after about the same time. Who is expected within `grace` seconds after another, by
    its speed, is waited for, and both get the same model.
    """
    outer = DelayedNesterov(x.memory, outer_rate, outer_momentum, early)
    version = x.memory.setdefault("version", torch.tensor(0))
    speeds: dict[int, float] = {}
    expected: dict[int, float] = {}
    held: list[Message] = []
    until = 0.0

    def arrived(message: Message) -> None:
        sent: PseudoGradient | Left = message.payload
        expected.pop(message.source, None)
        if isinstance(sent, Left):
            speeds.pop(message.source, None)
        elif sent.way is not None:
            x.add_(outer.step(sent.way, max(1, len(w.live))), -1.0)
            w.observe("outer_staleness", int(version) - sent.read)
            version.add_(1)
            if sent.speed:
                speeds[message.source] = sent.speed

    def give(message: Message) -> None:
        own = speeds.get(message.source, 0.0)
        steps = period
        if own and dynamic:
            steps = max(min(fewest, period), round(period * own / max(speeds.values())))
        if own:
            expected[message.source] = w.now() + steps / own
        w.reply(message, Given(x.snapshot(), int(version), steps))

    while True:
        try:
            arriving = w.receive(INBOX)
            left = max(_INSTANT_S, until - w.now())
            message = await (w.within(left, arriving) if held else arriving)
            arrived(message)
            if message.reply_to:
                until = until if held else w.now() + grace
                held.append(message)
        except Late:
            pass
        soon = [when for when in expected.values() if when < until + _INSTANT_S]
        if not soon or until - w.now() < _INSTANT_S:
            for one in held:
                give(one)
            held.clear()


# ---------------------------------------------------------------------- decoupled


@payload
@dataclass(frozen=True, slots=True)
class SentFragment:
    """A worker's fragment, the steps made since it last took that fragment from the server, and its
    steps per second."""

    fragment: int
    value: Tensor
    steps: int
    speed: float


@payload
@dataclass(frozen=True, slots=True)
class MergedFragment:
    """A server's fragment after a merge."""

    fragment: int
    value: Tensor


def parts_of(w: Worker, server: int, fragments: int, by: str) -> tuple[Fragment, ...]:
    """The fragments of one server's range, as parts of that range."""
    return fragments_of(w.layout.within(w.slices[server]), fragments, by)


async def decoupled_diloco(
    w: Worker, x: Replica, *, period: int = 24, fragments: int = 24, by: str = "balanced",
    mix: float = 0.0,
) -> None:  # fmt: skip
    """Douillard et al. 2026, Decoupled DiLoCo: learners that never wait.

    A learner sends each fragment once a period and takes whatever fragment has arrived between two
    of its steps; its optimiser's moments stay as they are.
    """
    places = [
        (server, number, part.moved(w.slices[at].start))
        for at, server in enumerate(w.servers)
        for number, part in enumerate(parts_of(w, at, fragments, by))
    ]
    steps = x.memory.setdefault("steps", torch.zeros(len(places), dtype=torch.int64))
    order = {(server, number): at for at, (server, number, _) in enumerate(places)}
    since, made = w.now(), 0

    def contribution(at: int) -> SentFragment:
        _, number, part = places[at]
        speed = made / max(w.now() - since, 1e-9)
        return SentFragment(number, own_copy(x, part), int(steps[at]), speed)

    try:
        for t in w.steps():
            x.descend_(await w.gradient(x))
            made += 1
            steps += 1
            for at in due(t, period, len(places)):
                w.send(places[at][0], contribution(at), tag=INBOX)
            for message in w.collect("merged"):
                at = order[message.source, message.payload.fragment]
                adopt_(x, places[at][2], message.payload.value, mix)
                steps[at] = 0
    except RunOver:
        pass
    # What was learnt since the last merges; a server answers when it has merged it.
    await gather([
        w.request(server, contribution(at), tag=INBOX) for at, (server, _, _) in enumerate(places)
    ])  # fmt: skip


async def syncer(
    w: Worker, x: Replica, *, period: int = 24, fragments: int = 24, by: str = "balanced",
    outer_rate: float = 0.7, outer_momentum: float = 0.9, quorum: int = 1, delay: int = 2,
    patience: float = 60.0, merge: str = "radial",
) -> None:  # fmt: skip
    """Merge a fragment when `quorum` workers have sent it and the others have had their time.

    That is `delay` steps of the fastest worker after the first had sent it, at most `patience`
    seconds: a worker that never waits has no use for the result earlier. PseudoGradients are taken
    from the present model and weighted by steps.
    """
    parts = parts_of(w, w.servers.index(w.rank), fragments, by)
    model = OuterModel(x, OuterOptimiser(outer_rate, outer_momentum, nesterov=True))
    held: list[dict[int, Message]] = [{} for _ in parts]
    ends: list[float | None] = [None] * len(parts)

    def consider() -> None:
        for number, sent in enumerate(held):
            clients = len(w.clients)
            if not sent or len(sent) < min(quorum, max(1, clients)):
                continue
            end, now = ends[number], w.now()
            if end is None:
                fastest = max(message.payload.speed for message in sent.values())
                wait = min(delay / fastest, patience) if fastest else 0.0
                end = ends[number] = now + wait
            if end - now < _INSTANT_S or len(sent) >= clients:
                _merge(w, x, model, parts[number], sent, is_radial=merge == "radial")
                ends[number] = None
                sent.clear()

    while True:
        waiting = [end for end in ends if end is not None]
        try:
            arriving = w.receive(INBOX)
            left = max(_INSTANT_S, min(waiting) - w.now()) if waiting else 0.0
            message = await (w.within(left, arriving) if waiting else arriving)
            if isinstance(message.payload, SentFragment):
                held[message.payload.fragment][message.source] = message
        except Late:
            pass
        consider()


def _merge(
    w: Worker, x: Replica, model: OuterModel, part: Fragment, sent: dict[int, Message], *,
    is_radial: bool,
) -> None:  # fmt: skip
    """One outer step of a fragment along what was sent, and the result to everybody."""
    ordered = [sent[rank] for rank in sorted(sent)]
    start = part.of(model.start)
    counted = [message.payload for message in ordered if message.payload.steps]
    if counted:
        ways = [start - one.value for one in counted]
        weights = [float(one.steps) for one in counted]
        shares = [weight / sum(weights) for weight in weights]
        mean = weighted_sum(list(zip(shares, ways, strict=True)))
        way = radial_mean(ways, weights, part.layout.sizes) if is_radial else mean
        adopt_(x, part, model.step(part, start - way))
    value = part.of(model.start).clone()
    number = ordered[0].payload.fragment
    for rank in sorted(w.clients):
        w.send(rank, MergedFragment(number, value), tag="merged")
    for message in ordered:
        if message.reply_to:
            w.reply(message, None)
