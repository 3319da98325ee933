"""What a cluster costs: dollars for workers and for bytes, and the energy of its workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gossamer.errors import ConfigurationError, unknown_name

HOUR, GIGABYTE = 3600.0, 1e9
OTHERS = "others"
SPENDINGS = ("dollars", "joules")
"""What a run on a cluster with prices spends, as keys of its rows and of its summary."""


@dataclass(frozen=True)
class Price:
    """The prices of a cluster; all zero where nobody has said any.

    All workers are paid and powered from the start of a run to its end, also those that wait, have
    ended or died: a rented machine costs the same idle or not. The machines of servers are free.
    """

    worker_hour: float = 0.0
    """Dollars for one hour of a worker that `own_hours` does not name."""
    own_hours: tuple[tuple[int, float], ...] = ()
    """Workers by rank that have a price of their own."""
    names_all: bool = False
    """Whether `own_hours` must name every worker, for there is no price for others."""
    egress_per_gb: float = 0.0
    """Dollars for 10^9 bytes that leave a site; without sites, that leave a machine."""
    watts: float = 0.0
    """The power of one worker while it computes."""
    idle_watts: float = 0.0
    """The power of one worker during the rest of the run."""

    @property
    def spendings(self) -> tuple[str, ...]:
        """What can be told of a run: dollars, joules, both or nothing."""
        hours = [self.worker_hour, *(own for _, own in self.own_hours)]
        told = (any([*hours, self.egress_per_gb]), any([self.watts, self.idle_watts]))
        return tuple(name for name, is_told in zip(SPENDINGS, told, strict=True) if is_told)

    def per_second(self, workers: int) -> float:
        """Dollars for one second of so many workers, without their bytes."""
        own = [hour for rank, hour in self.own_hours if rank < workers]
        return (math.fsum(own) + self.worker_hour * (workers - len(own))) / HOUR

    def bill(self, seconds: float, computing: Sequence[float], egress: float) -> dict[str, float]:
        """What a run has spent after so many seconds, of which each worker computed some, and with
        so many bytes of egress."""
        workers, busy = len(computing), math.fsum(computing)
        spent = {
            "dollars": seconds * self.per_second(workers) + egress / GIGABYTE * self.egress_per_gb,
            "joules": busy * self.watts + (workers * seconds - busy) * self.idle_watts,
        }
        return {name: spent[name] for name in self.spendings}

    def while_idle(self, workers: int) -> dict[str, float]:
        """What one second costs in which nobody computes or sends."""
        return self.bill(1.0, [0.0] * workers, 0.0)

    def check(self, workers: int) -> None:
        for name in ("worker_hour", "egress_per_gb", "watts", "idle_watts"):
            _check_amount(name, getattr(self, name))
        for rank, hour in self.own_hours:
            _check_amount(f"worker_hour of worker {rank}", hour)
            if not 0 <= rank < workers:
                raise ConfigurationError(
                    f"[price] worker_hour names worker {rank}, but the {workers} workers are "
                    f"numbered 0 to {workers - 1}"
                )
        if self.names_all and len(self.own_hours) < workers:
            named = {rank for rank, _ in self.own_hours}
            without = next(rank for rank in range(workers) if rank not in named)
            raise ConfigurationError(
                f"[price] worker_hour has no price for worker {without}; name it, or give "
                f"{OTHERS} = the price of every other worker"
            )

    def as_dict(self) -> dict[str, Any]:
        """The table [price], as `read_price` reads it."""
        hours: dict[str, float] | float = self.worker_hour
        if self.own_hours:
            rest = {} if self.names_all else {OTHERS: self.worker_hour}
            hours = {str(rank): hour for rank, hour in self.own_hours} | rest
        shown = {name: getattr(self, name) for name in ("egress_per_gb", "watts", "idle_watts")}
        return {"worker_hour": hours, **shown}

    def for_workers(self, workers: int) -> Price:
        """The prices of a cluster with another number of workers: new ones cost what the dearest
        named worker costs, if there is no price for others."""
        kept = tuple((rank, hour) for rank, hour in self.own_hours if rank < workers)
        others = self.worker_hour
        if self.names_all:
            others = max((hour for _, hour in self.own_hours), default=0.0)
        return Price(others, kept, False, self.egress_per_gb, self.watts, self.idle_watts)


def _check_amount(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigurationError(f"[price] {name} must be finite and at least 0, got {value:g}")


def read_price(given: Mapping[str, Any]) -> Price:
    """The table [price] of a file."""
    known = ("worker_hour", "egress_per_gb", "watts", "idle_watts")
    for key in given:
        if key not in known:
            raise unknown_name("key of [price]", key, known)
    hours: object = given.get("worker_hour", 0.0)
    egress, watts, idle = (_number(name, given.get(name, 0.0)) for name in known[1:])
    if not isinstance(hours, Mapping):
        hours = {OTHERS: hours}
    table = dict(cast(Mapping[str, object], hours))
    has_others = OTHERS in table
    others = _number("worker_hour", table.pop(OTHERS, 0.0))
    own = sorted((_rank(name), _number(f"worker_hour {name}", h)) for name, h in table.items())
    return Price(others, tuple(own), not has_others, egress, watts, idle)


def _rank(name: str) -> int:
    if not name.isdecimal():
        raise ConfigurationError(
            f"[price] worker_hour must name workers by their numbers, or {OTHERS}, got {name!r}"
        )
    return int(name)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"[price] {name} must be a number, got {value!r}")
    return float(value)
