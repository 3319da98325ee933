"""How often a run that a death stops should write a checkpoint: closed forms, and their check.

Everything of Daly 2006 in one frame: deaths come at random every M seconds, a checkpoint takes C
seconds, and a restart R seconds, in which another death may come. The run makes tau seconds of
work between two checkpoints, and loses what it has done since the last one with every death.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from gossamer.config.cluster import Cluster

KINDS = ("useful", "checkpoints", "lost work", "restarts")


def share_bar(shares: dict[str, float], width: int = 50) -> str:
    """The shares as one line: a bar of letters, then what each of them stands for."""
    ends = [round(width * sum(list(shares.values())[: at + 1])) for at in range(len(shares))]
    starts = [0, *ends]
    bar = "".join(
        kind[0] * (end - start) for kind, start, end in zip(shares, starts, ends, strict=False)
    )
    named = ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in shares.items())
    return f"[{bar}] {named}"


@dataclass(frozen=True)
class Checkpointing:
    """A run whose deaths come every `mtbf` seconds."""

    mtbf: float
    checkpoint: float
    restart: float = 0.0

    @staticmethod
    def of(cluster: Cluster) -> Checkpointing | None:
        """Of a run that any death in this cluster stops; None where none comes, or where the
        cluster does not say what a checkpoint costs."""
        failures = cluster.failures
        if not failures.are_there or not failures.checkpoint:
            return None
        units = cluster.machines if failures.per == "machine" else cluster.workers
        return Checkpointing(failures.mtbf / units, failures.checkpoint, failures.restart)

    @property
    def young(self) -> float:
        """Young 1974: the square root of 2 C M."""
        return math.sqrt(2 * self.checkpoint * self.mtbf)

    @property
    def daly(self) -> float:
        """Daly 2006, of higher order; M where a checkpoint takes twice as long as a life."""
        if self.checkpoint >= 2 * self.mtbf:
            return self.mtbf
        root = math.sqrt(self.checkpoint / (2 * self.mtbf))
        return self.young * (1 + root / 3 + root**2 / 9) - self.checkpoint

    def goodput(self, every: float) -> float:
        """The share of the time that is work which was kept: tau over the expected time of a piece,
        M e^(R / M) (e^((tau + C) / M) - 1)."""
        life = self.mtbf
        if (every + self.checkpoint + self.restart) / life > 500:
            return 0.0
        piece = math.exp(self.restart / life) * math.expm1((every + self.checkpoint) / life)
        return every / (life * piece)

    @property
    def best(self) -> float:
        """The interval of the greatest goodput: the closed form has one maximum."""
        low, high = 1e-6 * self.mtbf, 10 * self.mtbf
        for _ in range(200):
            third = (high - low) / 3
            if self.goodput(low + third) < self.goodput(high - third):
                low += third
            else:
                high -= third
        return (low + high) / 2

    def shares(self, every: float) -> dict[str, float]:
        """Where the time goes, as shares that add up to 1."""
        useful = self.goodput(every)
        checkpoints = useful * self.checkpoint / every
        # Every life begins with a restart, which its own end may cut short.
        restarts = -math.expm1(-self.restart / self.mtbf)
        lost = max(0.0, 1 - useful - checkpoints - restarts)
        return dict(zip(KINDS, (useful, checkpoints, lost, restarts), strict=True))

    def played(self, every: float, *, seed: int = 0, deaths: int = 20_000) -> dict[str, float]:
        """The same, by playing so many deaths."""
        rng = random.Random(f"{seed}/checkpoints")
        spent = dict.fromkeys(KINDS, 0.0)
        for _ in range(deaths):
            life = rng.expovariate(1 / self.mtbf)
            starting = min(life, self.restart)
            pieces = int((life - starting) // (every + self.checkpoint))
            spent["restarts"] += starting
            spent["useful"] += pieces * every
            spent["checkpoints"] += pieces * self.checkpoint
            spent["lost work"] += life - starting - pieces * (every + self.checkpoint)
        whole = sum(spent.values())
        return {kind: own / whole for kind, own in spent.items()}
