"""A method of your own: one coroutine and one row, then it runs like any other.

Pairwise gossip with one-sided operations: read a random peer, move towards it, and move it towards
you by the same amount. What one gains the other loses, so the mean is kept under every race.
"""

from gossamer import MethodSpec, PeerLost, simulate
from gossamer.methods import Method, Promises
from gossamer.replica import Replica
from gossamer.worker import Worker


async def pair_gossip(w: Worker, x: Replica, *, beta: float = 0.5, period: int = 1) -> None:
    """Boyd et al. 2006, randomised gossip. Promises: the mean is kept; no peer takes part."""
    for t in w.steps():
        if t > 0 and t % period == 0 and w.peers:
            peer = w.rng.choice(w.peers)
            try:
                theirs = await w.read(peer)
                delta = (theirs - x.snapshot()).mul_(beta)
                x.add_(delta)  # x_i <- x_i + beta (x_j - x_i)
                w.accumulate(peer, -delta)  # started, not awaited: it overlaps the gradient
            except PeerLost:
                pass  # drawn before its death was known: this round has no partner
        x.descend_(await w.gradient(x))


PAIR_GOSSIP = Method(
    "pair_gossip", "gossip", "Boyd et al. 2006", "mean", pair_gossip,
    Promises(
        keeps_mean=True, waits_for="peer's card", staleness="none", survives_death=True,
        traffic="2 / period", models_per_step=lambda p, o: 2 * (p > 1) / o["period"],
    ),
    is_synchronous=lambda options: False,
)  # fmt: skip

for spec in (MethodSpec(PAIR_GOSSIP, {}), MethodSpec(PAIR_GOSSIP, {"period": 4}), "pull_gossip"):
    result = simulate("digits-mlp", spec, "one-slow-of-8", seed=2, epochs=8)
    print(
        f"{spec!s:20} accuracy {100 * result.accuracy:.1f} %,"
        f" {result.virtual_seconds:.2f} virtual s,"
        f" {result.bytes_per_step / 1000:.1f} kB a step"
    )

# Prints:
# pair_gossip          accuracy 96.9 %, 1.01 virtual s, 38.5 kB a step
# pair_gossip:period=4 accuracy 96.4 %, 1.00 virtual s, 9.4 kB a step
# pull_gossip          accuracy 93.9 %, 1.01 virtual s, 19.3 kB a step
