"""Periodic averaging: local SGD, BMUF, SlowMo and DiLoCo are one family.

Each worker makes `period` local steps; then all take one outer step from their common start towards
(or past) the mean of their models. The four methods differ only in that outer step.
"""

from __future__ import annotations

from math import ceil

from gossamer.replica import Replica
from gossamer.rules import OuterOptimiser
from gossamer.worker import Worker


async def _outer_loop(
    w: Worker,
    x: Replica,
    outer: OuterOptimiser,
    *,
    period: int,
    switch: float = 0.0,
    by_rate: bool = False,
    state: str = "local",
) -> None:
    """In the first part of the run, the share `switch`, all workers average after every step."""
    start = x.memory.setdefault("start", x.snapshot())
    outer.velocity = x.memory.get("velocity")
    early = ceil(switch * w.expected_steps)
    for t in w.steps():
        x.descend_(await w.gradient(x))
        if t < early or (t + 1 - early) % period == 0:
            mean = await w.all_reduce(x.snapshot(), reference=start)
            start = outer.step(start, mean, x.learning_rate if by_rate else None)
            x.assign_(start)
            x.memory["start"] = start
            if outer.velocity is not None:
                x.memory["velocity"] = outer.velocity
            if state == "reset":
                x.reset_optimiser_()
            elif state == "averaged":
                x.load_optimiser_state_(await w.all_reduce(x.optimiser_state()))


async def local_sgd(
    w: Worker, x: Replica, *, period: int = 8, switch: float = 0.0, state: str = "local"
) -> None:
    """Zinkevich et al. 2010; with `switch` post-local SGD, Lin et al. 2020.

    Promises: averaging keeps the mean; everyone waits for everyone once a period. `state` says what
    happens to the momentum when models are averaged: local, averaged (twice the traffic) or reset.
    """
    await _outer_loop(w, x, OuterOptimiser(1.0, 0.0), period=period, switch=switch, state=state)


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
    w: Worker, x: Replica, *, period: int = 8, outer_rate: float = 0.7, outer_momentum: float = 0.9
) -> None:
    """Douillard et al. 2023, DiLoCo: an outer Nesterov step on the mean displacement.

    The inner optimiser's state stays with its worker and is never reset. The paper's 0.9 is meant
    for hundreds of steps; unless they are given, rate and momentum depend on the period and the
    number of workers.
    """
    await _outer_loop(
        w, x, OuterOptimiser(outer_rate, outer_momentum, nesterov=True), period=period
    )
