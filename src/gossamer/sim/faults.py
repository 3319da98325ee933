"""What can break in a simulated cluster, and how a person writes it down.

kill 3@2.5s               worker 3 dies
pause 2@1s+0.5s           worker 2 stands still for half a second
slow 0=10                 worker 0 computes ten times slower (from 1s for 2s: 0=10@1s+2s)
slow-link 0=10            the network card of worker 0 is ten times slower
drop 0.05                 each message is lost with that probability and sent again later
delay 20ms@1s+2s          every message takes that much longer
partition 0,1|2-7@1s+2s   the sides cannot reach each other until it heals
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.quantities import seconds

FOREVER = float("inf")


@dataclass(frozen=True)
class Fault:
    """One thing that breaks, from `at` for `lasts` seconds of virtual time."""

    kind: str
    at: float = 0.0
    lasts: float = FOREVER
    worker: int = -1
    amount: float = 0.0
    """The factor of slow and slow-link, the probability of drop, the seconds of delay."""
    sides: tuple[frozenset[int], ...] = ()

    @property
    def is_trait(self) -> bool:
        """A slow worker or link that is so from the start to the end: a trait of the cluster."""
        return self.kind in ("slow", "slow-link") and self.at == 0 and self.lasts == FOREVER

    def __str__(self) -> str:
        when = "" if self.at == 0 and self.lasts == FOREVER else f"@{self.at:g}s"
        if self.lasts != FOREVER and self.kind != "kill":
            when += f"+{self.lasts:g}s"
        match self.kind:
            case "kill" | "pause":
                return f"{self.kind} {self.worker}{when or '@0s'}"
            case "slow" | "slow-link":
                return f"{self.kind} {self.worker}={self.amount:g}{when}"
            case "drop":
                return f"drop {self.amount:g}{when}"
            case "delay":
                return f"delay {self.amount:g}s{when}"
            case _:
                sides = "|".join(",".join(map(str, sorted(side))) for side in self.sides)
                return f"partition {sides}{when}"


KINDS = ("kill", "pause", "slow", "slow-link", "drop", "delay", "partition")


def parse_fault(kind: str, text: str) -> Fault:
    """One fault from what follows its name, such as ("kill", "3@2.5s")."""
    if kind not in KINDS:
        raise unknown_name("fault", kind, KINDS)
    what, _, when = text.strip().partition("@")
    start, _, duration = when.partition("+")
    at = seconds(start, f"--{kind}") if start else 0.0
    lasts = seconds(duration, f"--{kind}") if duration else FOREVER
    wrong = ConfigurationError(f"--{kind} cannot read {text!r}; write it as {_EXAMPLES[kind]}")
    if kind in ("kill", "pause"):
        if not what.isdigit() or (kind == "pause" and lasts == FOREVER):
            raise wrong
        return Fault(kind, at, lasts, worker=int(what))
    if kind in ("slow", "slow-link"):
        match = re.fullmatch(r"(\d+)=([0-9.]+)", what)
        if match is None or float(match[2]) <= 0:
            raise wrong
        return Fault(kind, at, lasts, worker=int(match[1]), amount=float(match[2]))
    if kind == "drop":
        if re.fullmatch(r"[0-9.]+", what) is None or not 0 <= float(what) < 1:
            raise wrong
        return Fault(kind, at, lasts, amount=float(what))
    if kind == "delay":
        return Fault(kind, at, lasts, amount=seconds(what, "--delay"))
    try:
        sides = tuple(_ranks(side) for side in what.split("|"))
    except ValueError:
        raise wrong from None
    if (
        len(sides) < 2
        or not all(sides)
        or sum(map(len, sides)) != len(frozenset[int]().union(*sides))
    ):
        raise wrong
    return Fault(kind, at, lasts, sides=sides)


_EXAMPLES = {
    "kill": "3@2.5s",
    "pause": "2@1s+0.5s",
    "slow": "0=10 or 0=10@1s+2s",
    "slow-link": "0=10 or 0=10@1s+2s",
    "drop": "0.05 or 0.05@1s+2s (a probability below 1)",
    "delay": "20ms@1s+2s",
    "partition": "0,1|2-7@1s+2s, no worker on two sides",
}


def _ranks(text: str) -> frozenset[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return frozenset(ranks)


def random_faults(seed: int, workers: int, horizon_s: float, *, kills: int = 1) -> list[Fault]:
    """A plan drawn from a seed: all but deaths heals before three quarters of the horizon."""
    rng = random.Random(f"{seed}/faults")
    plan: list[Fault] = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice([kind for kind in KINDS if kind != "kill"])
        at = rng.uniform(0.0, 0.5 * horizon_s)
        lasts = rng.uniform(0.02, 0.25) * horizon_s
        worker = rng.randrange(workers)
        if kind in ("slow", "slow-link"):
            plan.append(Fault(kind, at, lasts, worker, amount=rng.choice([2.0, 10.0, 100.0])))
        elif kind == "drop":
            plan.append(Fault(kind, at, lasts, amount=rng.uniform(0.01, 0.3)))
        elif kind == "delay":
            plan.append(Fault(kind, at, lasts, amount=rng.uniform(0.0, 0.05) * horizon_s))
        elif kind == "pause":
            plan.append(Fault(kind, at, lasts, worker))
        elif workers > 1:
            ranks = list(range(workers))
            rng.shuffle(ranks)
            cut = rng.randint(1, workers - 1)
            plan.append(
                Fault(kind, at, lasts, sides=(frozenset(ranks[:cut]), frozenset(ranks[cut:])))
            )
    for worker in rng.sample(range(workers), rng.randint(0, min(kills, workers - 2))):
        plan.append(Fault("kill", rng.uniform(0.0, horizon_s), worker=worker))
    return plan
