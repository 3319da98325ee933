"""Periodic averaging: local SGD, BMUF, SlowMo and DiLoCo are one family.

Each worker makes `period` local steps; then all take one outer step from their common start towards
(or past) the mean of their models. The four methods differ only in that outer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from torch import Tensor

from gossamer.methods.outer import OuterModel, adopt_, due, observe_agreement, own_copy
from gossamer.pending import Pending
from gossamer.replica import Fragment, Replica, fragments_of
from gossamer.rules import OuterOptimiser
from gossamer.worker import Worker


async def _outer_loop(
    w: Worker, x: Replica, outer: OuterOptimiser, *, period: int, switch: float = 0.0,
    by_rate: bool = False, state: str = "local", parts: Sequence[Fragment] = (), delay: int = 0,
    mix: float = 0.0,
) -> None:  # fmt: skip
    """In the first part of the run, the share `switch`, all workers average after every step. A
    meeting of fragments is waited for `delay` steps after it began."""
    parts = parts or fragments_of(w.layout, 1, "sequential")
    model = OuterModel(x, outer)
    # Of a meeting that a checkpoint interrupted there is what was sent, and it is sent again.
    sent = {name: value for name, value in x.memory.items() if name.startswith("sent ")}

    def exchange(number: int, value: Tensor) -> Pending[Tensor]:
        part = parts[number]
        return w.all_reduce(value, reference=part.of(model.start), part=part)

    flight = [(*_numbers(name), exchange(_numbers(name)[1], sent[name])) for name in sent]

    async def meet() -> None:
        (began, number), inner_rate = flight[0][:2], x.learning_rate if by_rate else None
        part = parts[number]
        mean = await flight.pop(0)[2]
        own = x.memory[f"sent {began} {number}"] if delay else part.of(x.snapshot())
        observe_agreement(w, own, mean, part.of(model.start))
        adopt_(x, part, model.step(part, mean, inner_rate), mix)
        x.memory.pop(f"sent {began} {number}", None)

    early = ceil(switch * w.expected_steps)
    for t in w.steps():
        x.descend_(await w.gradient(x))
        meeting = range(len(parts)) if t < early else due(t - early, period, len(parts))
        for number in meeting:
            value = own_copy(x, parts[number])
            flight.append((t, number, exchange(number, value)))
            if delay:
                x.memory[f"sent {t} {number}"] = value
            del value  # what is sent is not held longer than its exchange
        while flight and flight[0][0] + delay <= t:
            await meet()
            if state == "reset":
                x.reset_optimiser_()
            elif state == "averaged":
                x.load_optimiser_state_(await w.all_reduce(x.optimiser_state()))
    while flight:
        await meet()


def _numbers(name: str) -> tuple[int, int]:
    _, began, number = name.split()
    return int(began), int(number)


async def local_sgd(
    w: Worker, x: Replica, *, period: int = 8, switch: float = 0.0, state: str = "local"
) -> None:
    """Zinkevich et al. 2010; with `switch` post-local SGD, Lin et al. 2020.

    Promises: averaging keeps the mean; everyone waits for everyone once a period. `state` says what
    happens to the momentum when models are averaged: local, averaged (twice the traffic) or reset.
    """
    await _outer_loop(w, x, OuterOptimiser(1.0, 0.0), period=period, switch=switch, state=state)


async def hierarchical_sgd(
    w: Worker, x: Replica, *, period: int = 32, inner: int = 8, sites: int = 2
) -> None:
    """Lin et al. 2020, hierarchical local SGD: averages at two periods.

    Workers of a site (consecutive ranks) average every `inner` steps, all workers every `period`
    steps. Where both are the same it is local SGD.
    """
    site = w.rank * sites // w.size
    own = [rank for rank in range(w.size) if rank * sites // w.size == site]
    for t in w.steps():
        x.descend_(await w.gradient(x))
        if (t + 1) % period == 0:
            x.assign_(await w.all_reduce(x.snapshot()))
        elif (t + 1) % inner == 0:
            x.assign_(await w.all_reduce(x.snapshot(), over=own))


async def bmuf(
    w: Worker,
    x: Replica,
    *,
    period: int = 8,
    block_momentum: float = 0.875,
    zeta: float = 1.0,
    nesterov: bool = True,
    state: str = "reset",
) -> None:
    """Chen & Huo 2016, block momentum: D <- eta_b D + zeta (mean - start), x <- x + D.

    With eta_b = 1 - 1/N the steady progress is that of N-worker SGD. With blocks of a few steps
    this diverges, so the default is smaller. `nesterov` is the published recursion. The local
    momentum is reset at every block, because the method often diverges otherwise.
    """
    await _outer_loop(
        w, x, OuterOptimiser(zeta, block_momentum, nesterov), period=period, state=state
    )


async def slowmo(
    w: Worker, x: Replica, *, period: int = 8, alpha: float = 1.0, beta: float = 0.5,
    state: str = "local",
) -> None:  # fmt: skip
    """Wang et al. 2020: u <- beta u + (x_0 - mean) / eta, then x_0 <- x_0 - alpha eta u."""
    await _outer_loop(w, x, OuterOptimiser(alpha, beta), period=period, by_rate=True, state=state)


async def diloco(
    w: Worker, x: Replica, *, period: int = 8, outer_rate: float = 0.7, outer_momentum: float = 0.9,
    fragments: int = 1, by: str = "balanced", delay: int = 0, mix: float = 0.0,
) -> None:  # fmt: skip
    """Douillard et al. 2023, DiLoCo, and 2025, Streaming DiLoCo: an outer Nesterov step.

    The inner optimiser's state stays with its worker and is never reset. The paper's 0.9 is meant
    for hundreds of steps; unless they are given, rate and momentum depend on the period and the
    number of workers. With `fragments`, parts of the model meet in turn, each once a period; after
    `delay` steps a worker takes the result, of which it replaces the share `mix` by its own part.
    """
    outer = OuterOptimiser(outer_rate, outer_momentum, nesterov=True)
    parts = fragments_of(w.layout, fragments, by)
    await _outer_loop(w, x, outer, period=period, parts=parts, delay=delay, mix=mix)


async def sparse_loco(w: Worker, x: Replica, *, period: int = 8, outer_rate: float = 1.0) -> None:
    """Sarfi et al. 2025, SparseLoCo: local steps, then 1 of 64 numbers of the displacement.

    What was not sent is added to the next displacement and decays by 0.95 a round, which stands in
    for an outer momentum. The compressor does that; another one may be put in its place, as in
    `sparse_loco+topk:share=0.03,bits=2,decay=0.95`.
    """
    await _outer_loop(w, x, OuterOptimiser(outer_rate, 0.0), period=period)
