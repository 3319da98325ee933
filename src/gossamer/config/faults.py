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
from dataclasses import dataclass

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.quantities import number, seconds

FOREVER = float("inf")
KINDS = ("kill", "pause", "slow", "slow-link", "drop", "delay", "partition")
_OF_A_WORKER = ("kill", "pause", "slow", "slow-link")
_SLOWEST = 1e9
_MOST_WORKERS = 1_000_000


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

    def __post_init__(self) -> None:
        """Refuse what could not happen, or would silently not."""
        if self.kind not in KINDS:
            raise unknown_name("fault", self.kind, KINDS)
        amounts = {
            "slow": 0 < self.amount <= _SLOWEST,
            "slow-link": 0 < self.amount <= _SLOWEST,
            "drop": 0 <= self.amount < 1,
            "delay": 0 <= self.amount < FOREVER,
        }
        named = [rank for side in self.sides for rank in side]
        fits = (
            0 <= self.at < FOREVER
            and self.lasts > 0
            and amounts.get(self.kind, self.amount == 0)
            and (self.worker >= 0) == (self.kind in _OF_A_WORKER)
            and (self.kind != "kill" or self.lasts == FOREVER)
            and (self.kind != "pause" or self.lasts < FOREVER)
            and (self.kind == "partition") == (len(self.sides) > 1 and all(self.sides))
            and len(named) == len(set(named))
        )
        if not fits:
            raise ConfigurationError(
                f"the fault '{self}' cannot happen; write it as {self.kind} {_EXAMPLES[self.kind]}"
            )

    @property
    def is_trait(self) -> bool:
        """A slow worker or link that is so from the start to the end: a trait of the cluster."""
        return self.kind in ("slow", "slow-link") and self.at == 0 and self.lasts == FOREVER

    def __str__(self) -> str:
        when = "" if self.at == 0 and self.lasts == FOREVER else f"@{_shown(self.at)}s"
        if self.lasts != FOREVER:
            when += f"+{_shown(self.lasts)}s"
        match self.kind:
            case "kill" | "pause":
                return f"{self.kind} {self.worker}{when or '@0s'}"
            case "slow" | "slow-link":
                return f"{self.kind} {self.worker}={_shown(self.amount)}{when}"
            case "drop":
                return f"drop {_shown(self.amount)}{when}"
            case "delay":
                return f"delay {_shown(self.amount)}s{when}"
            case _:
                sides = "|".join(",".join(map(str, sorted(side))) for side in self.sides)
                return f"partition {sides}{when}"


def parse_fault(kind: str, text: str) -> Fault:
    """One fault from what follows its name, such as ("kill", "3@2.5s")."""
    if kind not in KINDS:
        raise unknown_name("fault", kind, KINDS)
    try:
        return _parsed(kind, text)
    except (ConfigurationError, ValueError):
        raise ConfigurationError(
            f"--{kind} cannot read {text!r}; write it as {_EXAMPLES[kind]}"
        ) from None


def _parsed(kind: str, text: str) -> Fault:
    what, has_time, when = text.strip().partition("@")
    start, has_end, duration = when.partition("+")
    at = seconds(start, kind) if has_time else 0.0
    lasts = seconds(duration, kind) if has_end else FOREVER
    if kind == "kill" and not has_time:
        raise ValueError
    if kind == "partition":
        return Fault(kind, at, lasts, sides=tuple(_ranks(side) for side in what.split("|")))
    if kind == "delay":
        return Fault(kind, at, lasts, amount=seconds(what, kind))
    worker, has_amount, amount = what.partition("=")
    if kind == "drop":
        worker, has_amount, amount = "-1", "=", what
    factor = number(amount) if has_amount else 0.0
    if factor is None:
        raise ValueError
    return Fault(kind, at, lasts, worker=int(worker), amount=factor)


_EXAMPLES = {
    "kill": "3@2.5s",
    "pause": "2@1s+0.5s",
    "slow": "0=10 or 0=10@1s+2s",
    "slow-link": "0=10 or 0=10@1s+2s",
    "drop": "0.05 or 0.05@1s+2s (a probability below 1)",
    "delay": "20ms or 20ms@1s+2s",
    "partition": "0,1|2-7@1s+2s, no worker on two sides",
}


def _shown(value: float) -> str:
    """Short where that loses nothing, so that what is written down reads back the same."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _ranks(text: str) -> frozenset[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) > _MOST_WORKERS:
            raise ValueError
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
