"""A method of your own: one coroutine under its row of promises, then it runs like any other.

    gossamer check-method examples/04_own_method.py:pair_gossip
    gossamer compare --method examples/04_own_method.py:pair_gossip:period=4 --method pull_gossip

Pairwise gossip with one-sided operations: read a random peer, move towards it, and move it towards
you by the same amount. What one gains the other loses, so the mean is kept under every race.
"""

import gossamer
from gossamer import MethodSpec, PeerLost, simulate
from gossamer.replica import Replica
from gossamer.worker import Worker


@gossamer.method(
    keeps_mean=True,
    waits_for="peer's card",
    models_per_step=lambda workers, options: 2 * (workers > 1) / options["period"],
    traffic="2 / period",
    family="gossip",
    paper="Boyd et al. 2006",
)
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


if __name__ == "__main__":
    seldom = MethodSpec(pair_gossip, {"period": 4})
    for name, spec in {"paired": MethodSpec(pair_gossip, {}), "paired, period 4": seldom,
                       "pulled": "pull_gossip"}.items():  # fmt: skip
        result = simulate("digits-mlp", spec, "one-slow-of-8", seed=2, epochs=8)
        print(
            f"{name:16} accuracy {100 * result.accuracy:.1f} %,"
            f" {result.virtual_seconds:.2f} virtual s,"
            f" {result.bytes_per_step / 1000:.1f} kB a step"
        )

# Prints:
# paired           accuracy 96.9 %, 1.01 virtual s, 38.5 kB a step
# paired, period 4 accuracy 96.4 %, 1.00 virtual s, 9.4 kB a step
# pulled           accuracy 93.9 %, 1.01 virtual s, 19.3 kB a step
