"""Parameter servers, from waiting for all to waiting for none. The workers of most are one text."""

from __future__ import annotations

from collections import Counter
from math import exp
from typing import Literal

import torch
from torch import Tensor

from gossamer.errors import RunOver
from gossamer.methods.shards import Parameters, Push, Shards
from gossamer.pending import Pending
from gossamer.replica import Replica
from gossamer.rules import delay_compensated, mean_in_order
from gossamer.worker import INBOX, Left, Message, Worker


async def client(w: Worker, x: Replica) -> None:
    """The worker of every method whose server answers a gradient with parameters."""
    shards = Shards(w)
    x.assign_(await shards.pull())
    for t in w.steps():
        x.assign_(await shards.push(await w.gradient(x), clock=t))


async def asynchronous_client(w: Worker, x: Replica, *, overlap: bool = False) -> None:
    """The same for a server that does not need the gradient of its newest version.

    With `overlap` the transfer runs while the next gradient is computed, and the answer to a push
    is used a step later. So nobody waits for a network that is faster than a step, and a gradient
    is older by one of each worker's updates.
    """
    shards = Shards(w)
    x.assign_(await shards.pull())
    asked: list[Pending[list[Parameters]]] = []
    for t in w.steps():
        asked.append(shards.ask(await w.gradient(x), clock=t))
        if len(asked) > overlap:
            x.assign_(shards.adopt(await asked.pop(0)))


def answer(w: Worker, x: Replica, message: Message, clock: int = 0) -> None:
    if message.reply_to:
        w.reply(message, Parameters(x.snapshot(), x.version, clock))


def descend_along_mean(x: Replica, held: list[Message]) -> None:
    """Descend along the mean of the held gradients, added in order of rank."""
    ordered = sorted(held, key=lambda message: message.source)
    pushes: list[Push] = [message.payload for message in ordered]
    gradients = [push.gradient for push in pushes if push.gradient is not None]
    x.descend_(mean_in_order(gradients), read=[push.read for push in pushes])


async def sync_server(w: Worker, x: Replica, *, backups: int = 0, decay: float = 0.0) -> None:
    """Chen et al. 2016: the first N gradients of N + b workers make a step; late ones are dropped.

    Promises: exactly N = living - b gradients per update, all computed from its version. Without
    backups it is the hard-synchronous server. `decay` keeps a moving average for evaluation.
    """
    held: list[Message] = []
    live = w.live
    average = x.memory.setdefault("average", x.snapshot()) if decay else None
    x.output = average
    while True:
        message = await w.receive(INBOX)
        push = message.payload
        if isinstance(push, Push):
            if push.gradient is None:
                answer(w, x, message)
            elif push.read != x.version:
                w.observe("dropped")
                answer(w, x, message)
            else:
                held.append(message)
        if live is not w.live or message.source not in live:
            live = w.live
            held = [m for m in held if m.source in live]  # without the dead
        needed = max(1, len(live) - backups)
        if len(held) >= needed:
            descend_along_mean(x, held)
            if average is not None:
                average.lerp_(x.snapshot(), 1 - decay)
            for contributor in sorted(held, key=lambda m: m.source):
                answer(w, x, contributor)
            held = []
        elif len(w.clients) < needed:  # the run is ending: there will be no further update
            for late in held:
                w.observe("dropped")
                answer(w, x, late)
            held = []


async def downpour(
    w: Worker, x: Replica, *, n_push: int = 1, n_fetch: int = 1, overlap: bool = False
) -> None:
    """Dean et al. 2012, Downpour SGD. Promises: nobody waits for another worker.

    With `overlap`, as in DistBelief, a worker pushes and fetches beside computing: what it fetches
    is used a step later, and meanwhile it follows its own gradients.
    """
    shards = Shards(w)
    x.assign_(await shards.pull())
    asked: list[tuple[int, Pending[list[Parameters]]]] = []
    try:
        for t in w.steps():
            grad = await w.gradient(x)
            before = x.memory.pop("accrued", None)
            accrued = grad if before is None else before + grad
            pushes, fetches = (t + 1) % n_push == 0, (t + 1) % n_fetch == 0
            own = grad.clone() if overlap or not fetches else None
            if fetches:  # the answer to the push is the fetch
                asked.append((t, shards.ask(accrued if pushes else None)))
            elif pushes:
                shards.send(accrued)
            if asked and asked[0][0] + overlap <= t:
                x.assign_(shards.adopt(await asked.pop(0)[1]))
            if own is not None:
                x.descend_(own)  # the local copy moves on until the next fetch
            if not pushes:
                x.memory["accrued"] = accrued
    except RunOver:
        pass  # the gradient is discarded, but what was accrued before is still pushed
    if "accrued" in x.memory:
        await shards.push(x.memory.pop("accrued"))


async def downpour_server(
    w: Worker, x: Replica, *, n_push: int = 1, n_fetch: int = 1, divide: bool = True,
    warm_start: float = 0.0, introduce: float = 0.0,
) -> None:  # fmt: skip
    """Apply every gradient when it arrives and answer with the parameters after it.

    The gradients that a worker accrues without seeing the others' updates count as one: their mean.
    Without `divide` they are added up, as in the paper, and the rate must be smaller by their
    number. One worker trains alone for the share `warm_start` of the run's updates; the others
    begin one after the other over the following share `introduce`.
    """
    waiting: dict[int, Message] = {}
    updates = w.expected_steps * w.size / n_push
    while True:
        message = await w.receive(INBOX)
        push = message.payload
        if isinstance(push, Push) and push.gradient is None:
            waiting[message.source] = message
        elif isinstance(push, Push):
            if push.gradient is not None:
                accrued, apart = (n_push, max(n_push, n_fetch)) if divide else (1, 1)
                share = accrued / apart
                x.descend_(push.gradient / accrued, read=push.read, share=share)
            answer(w, x, message)
        order = sorted(w.clients) if waiting and (warm_start or introduce) else []
        for rank in sorted(waiting):
            turn = order.index(rank) if rank in order else 0
            begin = (warm_start + introduce * turn / w.size) * updates
            if turn == 0 or x.version >= begin:
                answer(w, x, waiting.pop(rank))


async def softsync_server(
    w: Worker,
    x: Replica,
    *,
    n: int = 1,
    divide: bool = True,
    damping: Literal["none", "inverse", "exponential", "polynomial"] = "none",
    strength: float = 1.0,
    cap: int | None = None,
) -> None:
    """Gupta et al. 2016, n-softsync: an update after every c = p / n gradients, from anyone.

    x <- x - (alpha / c) sum of the c gradients, alpha divided by n, about the mean staleness.
    Staleness-aware (Zhang et al. 2016): each gradient is damped by its own staleness tau instead,
    by 1 / max(tau, 1), e^(-strength tau) or (1 + tau)^(-strength), and dropped beyond the cap.
    """
    held: list[tuple[Push, float]] = []
    while True:
        message = await w.receive(INBOX)
        push = message.payload
        if isinstance(push, Push) and push.gradient is not None:
            staleness = max(0, x.version - push.read)  # a lost version is not old
            if cap is not None and staleness > cap:
                w.observe("dropped")
            else:
                held.append((push, damp(staleness, damping, strength)))
                w.observe("queue", len(held))
        c = max(1, len(w.live) // n)
        if len(held) >= c:
            read, share = [push.read for push, _ in held], 1 / n if divide else 1.0
            mean, damped = damped_mean(held)
            x.descend_(mean, read=read, share=share * damped)
            held = []
        elif not w.clients:  # the run is over, with too few gradients for another update
            for _ in held:
                w.observe("dropped")
            held = []
        if isinstance(push, Push):
            answer(w, x, message)


def damped_mean(held: list[tuple[Push, float]]) -> tuple[Tensor, float]:
    """The mean of the gradients weighted by their factors, and the mean factor. The learning rate
    is multiplied by the latter, because a smaller gradient would not make Adam's step smaller."""
    mean = sum(factor for _, factor in held) / len(held)
    weights = [factor / mean if mean else 0.0 for _, factor in held]
    gradients = [push.gradient for push, _ in held if push.gradient is not None]
    return mean_in_order([g * by for g, by in zip(gradients, weights, strict=True)]), mean


def damp(staleness: int, damping: str, strength: float) -> float:
    """The factor of a gradient that missed this many updates; 1 for a fresh one."""
    match damping:
        case "inverse":
            return 1.0 / max(staleness, 1)
        case "exponential":
            return exp(-strength * staleness)
        case "polynomial":
            return (1.0 + staleness) ** -strength
        case _:
            return 1.0


async def dc_asgd_server(
    w: Worker,
    x: Replica,
    *,
    compensation: float = 0.04,
    adaptive: bool = False,
    mean_square: float = 0.95,
    shared: bool = False,
) -> None:
    """Zheng et al. 2017, DC-ASGD: w <- w - eta (g + lambda g g (w - w_bak)).

    w_bak is the value that the worker was given to compute g. `adaptive` divides lambda by the root
    of a running mean of g squared (their DC-ASGD-a). Each worker has its own mean, which starts at
    zero; with `shared` there is one mean of all gradients, corrected for its start at zero.
    """
    given: dict[int, dict[int, Tensor]] = {}
    while True:
        message = await w.receive(INBOX)
        push = message.payload
        if isinstance(push, Left):
            given.pop(message.source, None)
            x.memory.pop(f"squares {message.source}", None)
            continue
        if push.gradient is not None:
            scale: float | Tensor = compensation
            if adaptive:
                whose = None if shared else message.source
                mean = mean_of_squares(x.memory, push.gradient, mean_square, whose)
                scale = compensation / (mean + 1e-7).sqrt()
            known = given.get(message.source, {})
            # A version that was lost with a server is unknown, and nothing is compensated.
            drift = x.snapshot() - known.get(push.read, x.snapshot())
            # With overlap two gradients may be of one value, and none is of an older one again.
            given[message.source] = {at: value for at, value in known.items() if at >= push.read}
            x.descend_(delay_compensated(push.gradient, drift, scale), read=push.read)
        given.setdefault(message.source, {})[x.version] = x.snapshot()
        answer(w, x, message)


def mean_of_squares(
    memory: dict[str, Tensor], gradient: Tensor, factor: float, worker: int | None
) -> Tensor:
    """The running mean after this gradient, of one worker or (None) of all."""
    name = "squares" if worker is None else f"squares {worker}"
    squares = memory.setdefault(name, torch.zeros_like(gradient))
    squares.mul_(factor).addcmul_(gradient, gradient, value=1 - factor)
    if worker is not None:
        return squares
    weight = memory.setdefault("weight", torch.zeros((), dtype=torch.float64))
    weight.mul_(factor).add_(1).sub_(factor)
    return squares / max(float(weight), 1e-12)


async def ssp(
    w: Worker, x: Replica, *, bound: int = 4, divide: bool = False, overlap: bool = False
) -> None:
    """Ho et al. 2013, SSP: read from a cache that is at most `bound` clocks old; read my writes.

    Promises: the clock being computed is never more than `bound` ahead of the slowest one. With
    `overlap` the cache is read while the last gradient is computed for which it is new enough.
    """
    shards = Shards(w)
    x.assign_(await shards.pull())
    for t in w.steps():
        if t > shards.clock + bound:
            x.assign_(await shards.pull(clock=t))  # waits for the slowest worker
        is_last = overlap and t + 1 > shards.clock + bound
        asked = shards.ask(None, clock=t) if is_last else None
        grad = await w.gradient(x)
        if asked is not None:
            x.assign_(shards.adopt(await asked))  # it lacks this gradient only
        if bound == 0:  # the next read would wait for the end of this clock anyway
            x.assign_(await shards.push(grad, clock=t))
            continue
        shards.send(grad, clock=t)
        # The local step follows the server's rule, along a copy: the server owns what was sent.
        x.descend_(grad.clone(), share=1 / len(w.live) if divide else 1.0)


class Clocks:
    """How many clocks each worker has completed, and where the slowest of them is."""

    def __init__(self) -> None:
        self._completed: dict[int, int] = {}
        self._clients: frozenset[int] = frozenset()
        self._at: Counter[int] = Counter()
        """How many clients have completed so many clocks; only a few numbers of clocks occur."""

    def reached(self, rank: int, clock: int) -> None:
        before = self._completed.get(rank, 0)
        self._completed[rank] = max(clock, before)
        if clock > before and rank in self._clients:
            self._at[clock] += 1
            self._at[before] -= 1
            if not self._at[before]:
                del self._at[before]

    def slowest(self, clients: frozenset[int]) -> int:
        """The fewest clocks that any of these has completed; 0 without clients."""
        if clients is not self._clients:
            self._clients = clients
            self._at = Counter(self._completed.get(rank, 0) for rank in clients)
        return min(self._at, default=0)


async def clock_server(
    w: Worker, x: Replica, *, bound: int = 4, divide: bool = False, overlap: bool = False
) -> None:
    """Grant a read for clock t when the slowest worker has completed clock t - bound.

    With `overlap` a read is for the clock after the one that its worker computes meanwhile.

    Bounded delay (Li et al. 2014) is the same rule with a new read at every step. Updates add up,
    or with `divide` count 1/p each. With bound 0 nobody can read before the end of a clock, so
    updates are applied there, in order of rank, as by the synchronous server.
    """
    completed = Clocks()
    held: list[tuple[int, Message]] = []
    fresh: list[Message] = []
    granted_at = 0
    while True:
        message = await w.receive(INBOX)
        push = message.payload
        if isinstance(push, Push):
            # A worker that asks for clock t has completed t clocks, perhaps before a checkpoint.
            clock = push.clock + (push.gradient is not None)
            completed.reached(message.source, clock)
            if push.gradient is not None:
                fresh.append(message)
            if message.reply_to:
                held.append((clock + overlap, message))
        slowest = completed.slowest(w.clients)
        shares = max(1, len(w.live)) if divide else 1
        if bound == 0 and fresh and slowest > min(m.payload.clock for m in fresh):
            pushes = [m.payload for m in sorted(fresh, key=lambda m: m.source)]
            mean = mean_in_order([push.gradient for push in pushes])
            x.descend_(mean * (len(pushes) / shares), read=[push.read for push in pushes])
            fresh = []
        elif bound > 0:
            for update in fresh:
                push = update.payload
                x.descend_(push.gradient, read=push.read, share=1 / shares)
            fresh = []
        # While the slowest clock stays, none but the last can have become ready.
        new = held if slowest != granted_at else held[-1:]
        granted_at = slowest
        ready = [(clock, m) for clock, m in new if clock - slowest <= bound]
        held[len(held) - len(new) :] = [(clock, m) for clock, m in new if clock - slowest > bound]
        w.observe("queue", len(held))
        for clock, granted in ready:
            w.observe("clock_gap", clock - slowest)
            answer(w, x, granted, slowest)


async def hogwild(w: Worker, x: Replica, *, pieces: int = 8, sparse: bool = False) -> None:
    """Recht et al. 2011, HOGWILD!: shared parameters without locks.

    Component-wise adds are atomic, so no update is lost. An update is added in `pieces`, and a
    reader may see only some of them. With `sparse`, as in the paper, only the components that it
    changes are added, one after the other. Each update is a step of the worker's own optimiser.
    """
    shards = Shards(w)
    for _ in w.steps():
        point = torch.cat(await shards.read())
        x.assign_(point)
        x.descend_(await w.gradient(x))
        await shards.accumulate(x.snapshot() - point, pieces=0 if sparse else pieces)
        w.observe("shared update")
